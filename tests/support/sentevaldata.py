"""Small files in the format of every SentEval task, with the quirks that the published ones have; sets to learn."""

import random
from pathlib import Path

import numpy as np

from declutr.evaluation.senteval.tasks import LANGUAGES

COMPLETE = Path(__file__).resolve().parents[3] / "shared" / "data" / "senteval"

PROBING = {
    "sentence_length": ("0", "1", "2", "3", "4", "5"), "word_content": ("about", "because", "house"),
    "tree_depth": ("10", "5", "6"), "top_constituents": ("NP_VP_.", "OTHER", "S_VP_."), "bigram_shift": ("I", "O"),
    "past_present": ("PAST", "PRES"), "subj_number": ("NN", "NNS"), "obj_number": ("NN", "NNS"),
    "odd_man_out": ("C", "O"), "coordination_inversion": ("I", "O"),
}  # fmt: skip
_MRPC = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
_SICK = "pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment\n"


def write(folder, name, text, encoding="utf-8"):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode(encoding))
    return path


def write_binary(folder, ones=("a fine caf\u00e9 film", "", "good"), zeros=("bad", "a very long bad one")):
    """CR MR MPQA SUBJ: latin-1, one sentence a line, empty lines among them."""
    positive = ("CR/custrev.pos", "MR/rt-polarity.pos", "MPQA/mpqa.pos", "SUBJ/subj.objective")
    negative = ("CR/custrev.neg", "MR/rt-polarity.neg", "MPQA/mpqa.neg", "SUBJ/subj.subjective")
    for names, lines in ((positive, ones), (negative, zeros)):
        for name in names:
            write(folder, f"downstream/{name}", "".join(f"{line}\n" for line in lines), "latin-1")


def write_rest(folder):
    down = "downstream"
    for split in ("train", "dev", "test"):
        write(folder, f"{down}/SST/binary/sentiment-{split}", "it is good\t1\nna\u00efve\t0\n")
        write(folder, f"{down}/SST/fine/sentiment-{split}", "4 very  good\n0 bad\n")
        write(folder, f"{down}/SNLI/s1.{split}", "a man sleeps\na man sleeps\na dog\n")
        write(folder, f"{down}/SNLI/s2.{split}", "he is awake\nhe sleeps\nan animal\n")
        write(folder, f"{down}/SNLI/labels.{split}", "contradiction\nentailment\nneutral\n")
        row = "2387\tmain-captions\tMSRvid\t2012test\t{}\ta man\ta woman runs\n"
        write(folder, f"{down}/STS/STSBenchmark/sts-{split}.csv", "".join(row.format(x) for x in ("5.000", "0.25")))
    write(folder, f"{down}/TREC/train_5500.label", "HUM:ind Who is Jos\u00e9 ?\nABBR:exp What is NASA ?\n", "latin-1")
    write(folder, f"{down}/TREC/TREC_10.label", "NUM:dist How far : a mile ?\n", "latin-1")
    for split in ("train", "test"):
        rows = "1\t11\t12\tHe said so .\tSo he said .\n0\t13\t14\tOne .\tTwo things .\n"
        write(folder, f"{down}/MRPC/msr_paraphrase_{split}.txt", f"\ufeff{_MRPC}{rows}")
    body = "1\tA dog runs\tA cat\t3.3\tNEUTRAL\n2\tA dog\tA dog\t5.0\tENTAILMENT\n"
    body += "3\tIt rains\tIt is dry\t1\tCONTRADICTION\n"
    for name, end in (("train", "\n"), ("trial", "\n"), ("test_annotated", "\r\n")):
        write(folder, f"{down}/SICK/SICK_{name}.txt", (_SICK + body).replace("\n", end))
    for name, lines in PROBING.items():
        rows = [f"{split}\t{label}\tx\tWords of {label} .\n" for split in ("tr", "va", "te") for label in lines]
        write(folder, f"probing/{name}.txt", "".join(rows))


def write_sts(folder, subsets_by_year):
    """STS12-16: `{12: ("MSRpar", ...)}`; every second row of 15 and 16 has no score."""
    for year, subsets in subsets_by_year.items():
        below, gold = f"downstream/STS/STS{year}-en-test", "5\n\n0.2\n\n" if year >= 15 else "5\n3.25\n0.2\n1\n"
        for subset in subsets:
            write(folder, f"{below}/STS.input.{subset}.txt", "a man\ta dog runs\nb\tc\nthree words here\tx\nd\te\n")
            write(folder, f"{below}/STS.gs.{subset}.txt", gold)


def write_retrieval(folder, images=2):
    where = folder / "downstream/COCO"
    where.mkdir(parents=True, exist_ok=True)
    for split in ("train", "valid", "test"):
        np.save(where / f"{split}.npy", np.arange(images * 4, dtype=np.float32).reshape(images, 4))
        write(where, f"{split}.captions.txt", "".join(f"caption {i} of {split}\n" for i in range(5 * images)))


_WORDS = [f"w{number}" for number in range(40)]


def _sentence(rng, label, words=6):
    """Words of which half are of the label's own seven."""
    own = _WORDS[7 * label : 7 * label + 7]
    return " ".join(rng.choice(own if rng.random() < 0.5 else _WORDS) for _ in range(words))


def write_sets(folder, rows=40, seed=0):
    """MR, SST2, TREC, MRPC, SICK, STS-B, STS12 and Tense, to be learned: words that tell the class, rows for folds."""
    rng, down = random.Random(seed), "downstream"
    for name, label in (("pos", 1), ("neg", 0)):
        lines = "".join(f"{_sentence(rng, label)} {number}\n" for number in range(rows))
        write(folder, f"{down}/MR/rt-polarity.{name}", lines, "latin-1")
    for split in ("train", "dev", "test"):
        lines = [f"{_sentence(rng, number % 2)}\t{number % 2}\n" for number in range(rows)]
        write(folder, f"{down}/SST/binary/sentiment-{split}", "".join(lines))
    kinds = ("ABBR", "DESC", "ENTY", "HUM", "LOC")
    for name, count in (("train_5500.label", 2 * rows), ("TREC_10.label", rows)):
        lines = [f"{kinds[number % 5]}:x {_sentence(rng, number % 5)}\n" for number in range(count)]
        write(folder, f"{down}/TREC/{name}", "".join(lines), "latin-1")

    def pair(number):
        """Two sentences, with a tab between; the share of words that the second takes from the first is number / 5."""
        first = _sentence(rng, number % 5).split()
        second = [word if rng.random() < (number % 6) / 5 else rng.choice(_WORDS) for word in first]
        return f"{' '.join(first)}\t{' '.join(second)}"

    for split in ("train", "test"):
        lines = [f"{int(number % 6 > 2)}\t1\t2\t{pair(number)}\n" for number in range(rows)]
        write(folder, f"{down}/MRPC/msr_paraphrase_{split}.txt", _MRPC + "".join(lines))
    judged = ("CONTRADICTION", "NEUTRAL", "ENTAILMENT")
    for name in ("train", "trial", "test_annotated"):
        lines = [f"{n}\t{pair(n)}\t{1 + 0.8 * (n % 6)}\t{judged[n % 6 // 2]}\n" for n in range(rows)]
        write(folder, f"{down}/SICK/SICK_{name}.txt", _SICK + "".join(lines))
    for split in ("train", "dev", "test"):
        lines = [f"g\tf\ty\t{number}\t{number % 6}.000\t{pair(number)}\n" for number in range(rows)]
        write(folder, f"{down}/STS/STSBenchmark/sts-{split}.csv", "".join(lines))
    for subset in ("MSRpar", "MSRvid", "SMTeuroparl", "surprise.OnWN", "surprise.SMTnews"):
        where, count = f"{down}/STS/STS12-en-test", rng.randint(12, 24)
        write(folder, f"{where}/STS.input.{subset}.txt", "".join(f"{pair(number)}\n" for number in range(count)))
        write(folder, f"{where}/STS.gs.{subset}.txt", "".join(f"{number % 6}\n" for number in range(count)))
    tenses = [f"{PROBING['past_present'][number % 2]}\t" for number in range(rows)]
    lines = [f"{s}\t{tense}{_sentence(rng, n % 2)}\n" for s in ("tr", "va", "te") for n, tense in enumerate(tenses)]
    write(folder, "probing/past_present.txt", "".join(lines))
    return folder


TRANSLATED = "downstream/STS/stsb-multi-mt"
SENTENCES = {"de": "Eine Frau läuft, schnell.", "ru": "Женщина бежит, быстро.", "zh": "一个女人在跑步。"}


def write_translations(folder, rows=24, languages=LANGUAGES):
    """STS-B as in stsb_multi_mt: CSV without header, CRLF, quotes; the score is what the second sentence repeats."""
    for language in languages:
        for number, split in enumerate(("dev", "test")):
            lines = []
            for row in range(rows):
                words = [f"{language}{(row * 7 + place * 5 + number) % 31}" for place in range(5)]
                other = [word if place < row % 6 else f"{word}x" for place, word in enumerate(words)]
                first = SENTENCES.get(language, "Une femme court, vite.") + " " + " ".join(words)
                lines.append(f'"{first}","said ""so"", {" ".join(other)}",{row % 6}.0\r\n')
            write(folder, f"{TRANSLATED}/stsb-{language}-{split}.csv", "".join(lines))
    return folder
