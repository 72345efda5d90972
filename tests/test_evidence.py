"""Every number in a table of README, docs/index.md and docs/evidence is in a results file that its section names.

So are the rates of the guide to large corpora, from which its other tables are computed again here.
"""

import json
import re
from itertools import combinations
from pathlib import Path
from statistics import fmean, median, stdev

import pytest

ROOT = Path(__file__).resolve().parents[1]
LARGE = "docs/guides/large-corpus.md"
PAGES = [LARGE, "README.md", "docs/index.md"]
PAGES += [str(page.relative_to(ROOT)) for page in sorted(ROOT.glob("docs/evidence/*.md"))]
NUMBER = r"(?<![\w.])[-+]?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)"
# Numbers that belong together: `mean ± deviation`, `value [low, high]`, `value (low to high)`, or one alone.
TOGETHER = re.compile(rf"({NUMBER})(?: ± ({NUMBER})| \[({NUMBER}), ({NUMBER})\]| \(({NUMBER}) to ({NUMBER})\))?")
SCALES = (1, 100, 1_000, 1 / 60, 2**-10, 2**-20)  # of shares in percent, seconds in ms and minutes, bytes in MiB
UNFILED = re.compile(r"[Ii]n no file: ([^;]+?)\.(?:\s|$)|[Nn]othing here was measured", re.S)


def is_number(value):
    return isinstance(value, int | float) and not isinstance(value, bool)


def spread(values):
    """What a page may say of repetitions, such as seeds."""
    return [fmean(values), stdev(values), median(values), min(values), max(values), values[-1] - values[0]]


def average(trees):
    """The mean of dictionaries with the same keys and numbers as leaves; None of others."""
    if all(is_number(tree) for tree in trees):
        return fmean(trees)
    if not all(isinstance(tree, dict) and tree.keys() == trees[0].keys() for tree in trees):
        return None
    means = {key: average([tree[key] for tree in trees]) for key in trees[0]}
    return None if None in means.values() else means


def sets_of_numbers(tree):
    """Numbers that a cell may show together: those of one place of a file, and what follows from its repetitions."""
    items = list(tree.values()) if isinstance(tree, dict) else tree
    direct = [item for item in items if is_number(item)]
    lists = [item for item in items if isinstance(item, list) and len(item) <= 20]
    near = [number for numbers in lists for number in numbers if is_number(number)]
    texts = [item for item in [*items, *(tree if isinstance(tree, dict) else ())] if isinstance(item, str)]
    words = [float(number.replace(",", "")) for text in texts for number in re.findall(NUMBER, text)]
    yield [*direct, *near, *words, *(spread(direct) if 2 <= len(direct) <= 100 else [])]
    if isinstance(tree, dict) and len(items) > 1 and all(isinstance(item, dict) for item in items):
        parts = {part for key in tree for part in key.split(", ")} if any(", " in key for key in tree) else set()
        groups = [[value for key, value in tree.items() if part in key.split(", ")] for part in parts]
        for mean in map(average, [items, *groups]):  # a mean over columns, or over the other axes of a grid
            if mean is not None:
                yield from sets_of_numbers(mean)
    yield from of_rows([item for item in items if isinstance(item, dict)] if isinstance(tree, list) else [])
    for item in items:
        if isinstance(item, dict | list):
            yield from sets_of_numbers(item)


def of_rows(rows):
    """Repetitions among rows that have the same words, and their differences, row by row."""
    columns = {}
    for row in rows:
        label = tuple(value for value in row.values() if isinstance(value, str))
        for key, value in row.items():
            if is_number(value):
                columns.setdefault(key, {}).setdefault(label, []).append(value)
    for repetitions in columns.values():
        yield from (spread(values) for values in repetitions.values() if len(values) > 1)
        for first, second in combinations(repetitions.values(), 2):
            if len(first) == len(second) > 1:
                yield spread([b - a for a, b in zip(first, second, strict=True)])


def is_rounded(shown, values, scale):
    digits = shown.replace(",", "").lstrip("+-")
    zeros = len(digits) - len(digits.rstrip("0")) if digits.isdigit() and len(digits) > 3 else 0
    half = 0.5000001 * 10.0 ** (zeros - len(digits.partition(".")[2]))
    return any(abs(abs(value) * scale - float(digits)) <= half for value in values)


def tables(page):
    """Each section with numbers in a table: its heading, the numbers, the files, and those in no file (None: all)."""
    parts = re.split(r"(?m)^(#+ .*)$", (ROOT / page).read_text())
    for heading, body in zip(parts[1::2], parts[2::2], strict=True):
        rows = [row for table in re.findall(r"(?m)(?:^\|.*\n)+", body) for row in table.splitlines()[2:]]
        cells = [re.sub(r"`[^`]*`|\[[^]]*\]\([^)]*\)", "", cell) for row in rows for cell in row.split("|")[2:-1]]
        groups = [tuple(filter(None, numbers)) for cell in cells for numbers in TOGETHER.findall(cell)]
        files = re.findall(r"([\w.-]+\.json)`", body)
        names = [name for name in files if (ROOT / "benchmarks/results" / name).is_file()]
        unfiled = [match[1] for match in UNFILED.finditer(body)]
        if groups:
            all_unfiled = any(numbers in {None, "all"} for numbers in unfiled)
            listed = {number for numbers in unfiled if numbers for number in re.findall(NUMBER, numbers)}
            yield heading, groups, names, None if all_unfiled else listed


def unsupported(groups, names, unfiled=frozenset()):
    """The numbers that no file has, but for those of which the page says so."""
    groups = [left for group in groups if (left := tuple(number for number in group if number not in unfiled))]
    files = [json.loads((ROOT / "benchmarks/results" / name).read_text()) for name in names]
    sets = [values for file in files for values in sets_of_numbers(file) if values]
    pairs = [(values, scale) for values in sets for scale in SCALES]
    return [group for group in groups if not any(all(is_rounded(n, *pair) for n in group) for pair in pairs)]


@pytest.mark.parametrize("page", PAGES)
def test_numbers_of_tables_are_in_a_file(page):
    sections = [(*section, unfiled) for *section, unfiled in tables(page) if unfiled is not None]
    missing = {heading: (unsupported(groups, names, unfiled), names) for heading, groups, names, unfiled in sections}
    problems = [f"{page}, {key}: {groups} in none of {names}" for key, (groups, names) in missing.items() if groups]
    assert not problems, "\n".join(problems)


def test_a_changed_number_is_noticed():
    sections = {heading: (groups, names) for heading, groups, names, _ in tables("docs/evidence/results.md")}
    groups, names = sections["## SimCSE, SCD, SCL and DeCLUTR from one start"]
    for right, wrong in ((("61.0", "0.5"), ("61.1", "0.5")), (("+5.1", "+4.5", "+5.8"), ("+5.1", "+4.5", "+5.9"))):
        assert right in groups
        assert unsupported([right, wrong], names) == [wrong]


def test_minutes_memory_and_disk_of_200_gb_follow_from_the_rates_of_the_page():
    page, cpus, gib = (ROOT / LARGE).read_text(), (8, 32, 128), 2**30
    (_, _, names, _), *_ = tables(LARGE)
    rates, disk = (json.loads((ROOT / "benchmarks/results" / name).read_text()) for name in names)
    quality, all_rules, signatures = (
        float(re.search(rf"(?m)^\| {row}.* \| ([\d.]+) MiB/s \|$", page)[1])  # type: ignore[index]
        for row in ("filters `gopher`", "all filters", "signatures")
    )
    text, rate = 200e9 / 2**20, rates["mib_per_s"] / rates["workers"]  # MiB; MiB a second of a CPU
    documents = 200e9 / (rates["text_mib"] * 2**20 / rates["documents"]["read"])
    shards, peak = (disk["disk_mib"][key] / disk["text_mib"] for key in ("shards", "peak"))
    expected = {
        "as measured (10.4": [text / rate / 60 / number for number in cpus],
        "and `gopher`": [text * (1 / rate + 1 / quality) / 60 / number for number in cpus],
        "and all filters": [text * (1 / rate + 1 / all_rules + 1 / signatures) / 60 / number for number in cpus],
        "as measured, one": [text / rate / 60] * 3,
        "memory of": [rates["peak_rss_mib"] * 2**20 * number / gib for number in cpus],
        "text that": [rate * number for number in cpus],
        "shards, ledger": [shards, 200 * shards],
        "the same while": [peak, 200 * peak],
        "the same with": [2 * peak, 400 * peak],
        "keys of exact": [documents * 32 / 1e9],
        "keys of near": [documents * 582 / 1e9],
        "`cache`": [32 * 2**20 * 128 * peak / 1e9],
    }
    for row, values in expected.items():
        (cells,) = re.findall(rf"(?m)^\| {re.escape(row)}.*?\| (.*) \|$", page)
        printed = re.findall(NUMBER, cells)
        assert len(printed) == len(values), row
        assert [n for n, value in zip(printed, values, strict=True) if not is_rounded(n, [value], 1)] == [], row
