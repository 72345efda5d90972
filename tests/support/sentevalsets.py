"""Small SentEval tasks that can be learned: enough rows for folds, words that tell the class."""

import random

from sentevaldata import write

_WORDS = [f"w{number}" for number in range(40)]


def _sentence(rng, label, words=6):
    """Words of which half are of the label's own seven."""
    own = _WORDS[7 * label : 7 * label + 7]
    return " ".join(rng.choice(own if rng.random() < 0.5 else _WORDS) for _ in range(words))


def write_sets(folder, rows=40, seed=0):
    """MR, SST2, TREC, MRPC, SICK, STS-B, STS12 and Tense."""
    rng = random.Random(seed)
    down = "downstream"
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
        """Two sentences; the share of words that the second takes from the first is number / 5."""
        first = _sentence(rng, number % 5).split()
        second = [word if rng.random() < (number % 6) / 5 else rng.choice(_WORDS) for word in first]
        return " ".join(first), " ".join(second)

    header = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
    for split in ("train", "test"):
        lines = [f"{int(number % 6 > 2)}\t1\t2\t" + "\t".join(pair(number)) + "\n" for number in range(rows)]
        write(folder, f"{down}/MRPC/msr_paraphrase_{split}.txt", header + "".join(lines))
    head = "pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment\n"
    judged = ("CONTRADICTION", "NEUTRAL", "ENTAILMENT")
    for name in ("train", "trial", "test_annotated"):
        lines = [
            f"{number}\t" + "\t".join(pair(number)) + f"\t{1 + 0.8 * (number % 6)}\t{judged[number % 6 // 2]}\n"
            for number in range(rows)
        ]
        write(folder, f"{down}/SICK/SICK_{name}.txt", head + "".join(lines))
    for split in ("train", "dev", "test"):
        lines = [f"g\tf\ty\t{number}\t{number % 6}.000\t" + "\t".join(pair(number)) + "\n" for number in range(rows)]
        write(folder, f"{down}/STS/STSBenchmark/sts-{split}.csv", "".join(lines))
    for subset in ("MSRpar", "MSRvid", "SMTeuroparl", "surprise.OnWN", "surprise.SMTnews"):
        where = f"{down}/STS/STS12-en-test"
        count = rng.randint(12, 24)
        lines = "".join("\t".join(pair(number)) + "\n" for number in range(count))
        write(folder, f"{where}/STS.input.{subset}.txt", lines)
        write(folder, f"{where}/STS.gs.{subset}.txt", "".join(f"{number % 6}\n" for number in range(count)))
    lines = [
        f"{split}\t{('PAST', 'PRES')[number % 2]}\t{_sentence(rng, number % 2)}\n"
        for split in ("tr", "va", "te")
        for number in range(rows)
    ]
    write(folder, "probing/past_present.txt", "".join(lines))
    return folder
