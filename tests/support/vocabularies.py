"""Small Unigram and WordPiece tokenizers, as those of XLM-R and BERT are."""

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

MASK = AddedToken("<mask>", lstrip=True, special=True, normalized=False)
ROLES = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>", "cls": "<s>", "sep": "</s>", "mask": "<mask>"}
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEXTS = {
    "de": "Die Müllabfuhr fährt früh über die Straße, weil große Lastwagen später stören würden. ",
    "fr": "L’été dernier, où l’on a déjà goûté « le vin », Noël approchait à pas feutrés ; naïveté ! ",
    "ru": "Быстрая лиса перепрыгнула через ленивую собаку, и никто её не заметил в тёмном лесу. ",
    "zh": "人工智能正在改变我们的生活。二〇二六年，许多人每天使用它写作、翻译和学习。",
    "ja": "東京は日本の首都であり、世界でも最大級の都市です。カタカナとひらがなも使います。",
    "th": "ภาษาไทยเขียนติดกันโดยไม่เว้นวรรคระหว่างคำ แต่เว้นวรรคระหว่างประโยค ",
    "ar": "اللغة العربية تُكتب من اليمين إلى اليسار، ولها حروف متصلة. ",
    "hi": "हिन्दी देवनागरी लिपि में लिखी जाती है और इसमें मात्राएँ होती हैं। ",
    "ko": "한국어는 띄어쓰기를 하지만 조사가 단어에 붙습니다. 서울은 대한민국의 수도입니다. ",
}


def unigram(texts, size, roles=ROLES, ends=True, before=()):
    """One whose tokens have these roles, with or without tokens around a text, after these splits of it."""
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    metaspace = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.pre_tokenizer = pre_tokenizers.Sequence([*before, metaspace]) if before else metaspace
    names = [name for name in ("<s>", "<pad>", "</s>", "<unk>") if ends or name in roles.values()]
    options = {"unk_token": "<unk>", "show_progress": False, "n_sub_iterations": 1}
    trainer = trainers.UnigramTrainer(vocab_size=size, special_tokens=[*names, MASK], **options)
    backend.train_from_iterator(texts, trainer)
    if ends:
        around = [(token, backend.token_to_id(token)) for token in ("<s>", "</s>")]
        backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=around)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **{f"{role}_token": name for role, name in roles.items()})


def wordpiece(texts, size, **flags):
    backend, around = wordpiece_backend(texts, size, **flags), [("[CLS]", 2), ("[SEP]", 3)]
    backend.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=around)
    roles = zip(("pad", "unk", "cls", "sep", "mask"), SPECIALS, strict=True)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **{f"{role}_token": name for role, name in roles})


def wordpiece_backend(texts, size, longest=100, **flags):
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=longest))
    backend.normalizer = normalizers.BertNormalizer(**flags) if flags else None
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=size, show_progress=False, special_tokens=SPECIALS)
    backend.train_from_iterator(texts, trainer)
    return backend
