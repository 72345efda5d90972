"""Small files in the format of stsb_multi_mt: CSV without a header, CRLF, quotes around sentences with commas."""

from sentevaldata import write

from declutr.evaluation.senteval.tasks import LANGUAGES

FOLDER = "downstream/STS/stsb-multi-mt"
SENTENCES = {"de": "Eine Frau läuft, schnell.", "ru": "Женщина бежит, быстро.", "zh": "一个女人在跑步。"}


def write_translations(folder, rows=24, languages=LANGUAGES):
    """Pairs whose second sentence repeats more of the first the higher the score is."""
    for language in languages:
        for number, split in enumerate(("dev", "test")):
            lines = []
            for row in range(rows):
                words = [f"{language}{(row * 7 + place * 5 + number) % 31}" for place in range(5)]
                other = [word if place < row % 6 else f"{word}x" for place, word in enumerate(words)]
                first = SENTENCES.get(language, "Une femme court, vite.") + " " + " ".join(words)
                lines.append(f'"{first}","said ""so"", {" ".join(other)}",{row % 6}.0\r\n')
            write(folder, f"{FOLDER}/stsb-{language}-{split}.csv", "".join(lines))
    return folder
