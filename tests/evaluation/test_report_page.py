"""The page of a report in a real browser."""

import pytest

from declutr.report.corpus import write_corpus_page


@pytest.fixture(scope="module")
def page(prepared, tmp_path_factory):
    return write_report(prepared[0], tmp_path_factory.mktemp("report"))


@pytest.mark.slow
def test_page_loads_without_complaint_or_request(browser, page):
    browser.open(page)
    assert browser.run("return document.readyState") == "complete"
    assert browser.messages() == []
    assert browser.requests() == [page.as_uri()]


def test_totals_are_those_of_the_manifest_and_close(browser, page, prepared):
    browser.open(page)
    names = ("read", "kept", "dropped", "failed", "num_tokens")
    shown = {
        name: int(
            browser.run("return document.getElementById(arguments[0]).textContent", f"total-{name}").replace(",", "")
        )
        for name in names
    }
    assert shown == {name: prepared[1].totals[name] for name in names}
    assert shown["read"] == shown["kept"] + shown["dropped"] + shown["failed"]


def test_charts_are_there_to_be_seen(browser, page):
    browser.open(page)
    (histogram,) = browser.boxes("svg.histogram")
    assert histogram[0] > 600
    assert histogram[1] > 200
    assert all(width > 1 and height >= 1 for width, height in browser.boxes("svg.histogram rect"))
    bars = browser.boxes("svg.bar rect.kept, svg.bar rect.dropped, svg.bar rect.short, svg.bar rect.failed")
    assert len(bars) > 10
    assert all(height > 0 for _, height in bars)
    # The style sheet is in force: its hash in the page's policy is right.
    fill = "return getComputedStyle(document.querySelector('svg.histogram rect.kept')).fill"
    assert browser.run(fill) == "rgb(31, 111, 168)"


def test_bars_are_as_long_as_their_values(browser, page, prepared):
    browser.open(page)
    script = (
        "return [...document.querySelectorAll('#reasons tbody tr')].map(r => [r.cells[2].textContent,"
        " r.querySelectorAll('rect')[1].getBoundingClientRect().width])"
    )
    rows = [(int(number), width) for number, width in browser.run(script)]
    longest = max(width for _, width in rows)
    assert rows[0][0] == max(number for number, _ in rows) == prepared[1].dropped["too_short"]
    for number, width in rows:
        assert width == pytest.approx(longest * number / rows[0][0], abs=0.5)


def test_hostile_text_neither_runs_nor_breaks_the_page(browser, page):
    browser.open(page)
    browser.run("document.querySelectorAll('details').forEach(e => e.open = true)")
    assert browser.run("return document.title").startswith("Corpus report: <b>corpus & co")
    assert browser.run("return document.querySelectorAll('script, img, iframe, object, link').length") == 0
    assert browser.run("return document.querySelectorAll('h1 b, blockquote *').length") == 0
    text = browser.run("return document.body.innerText")
    assert "<script>document.title='run'</script>" in text
    assert "⟨U+202E⟩" in text
    assert not set(text) & set("\u202e\u2066\x00\x1b\x9b")
    assert browser.run("return document.querySelectorAll('body > main > section').length") == 8


def test_the_policy_forbids_scripts_and_requests_even_if_one_slipped_in(browser, page, tmp_path):
    evil = "<script>document.title='run'</script><img src='http://127.0.0.1:9/x.png' onerror=\"document.title='run'\">"
    copy = tmp_path / "copy.html"
    copy.write_text(page.read_text(encoding="utf-8").replace("</main>", f"{evil}</main>"), encoding="utf-8")
    browser.open(copy)
    assert browser.run("return document.title") != "run"
    assert any("Content Security Policy" in message for message in browser.messages())


def test_settings_open_when_asked(browser, page):
    browser.open(page)
    shown = "return document.querySelector('#settings pre').checkVisibility()"
    assert not browser.run(shown)
    browser.driver.find_element("css selector", "#settings summary").click()
    assert browser.run(shown)
    assert browser.boxes("#settings")[0][1] > 300
    assert "max_tokens: 16" in browser.run("return document.querySelector('#settings pre').textContent")


@pytest.mark.parametrize("width", [320, 400, 768])
def test_nothing_overflows_on_a_narrow_screen(browser, page, width):
    browser.open(page, width=width)
    assert browser.run("return window.innerWidth") == width
    assert browser.overflow() == 0
    browser.run("document.querySelectorAll('details').forEach(e => e.open = true)")
    assert browser.overflow() == 0
    assert browser.boxes("svg.histogram")[0][0] > 0.6 * width


def test_dark_and_light_have_enough_contrast(browser, page):
    """WCAG AA: 4.5 between text and ground."""
    script = """
        const parse = c => c.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
            .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        const light = c => { const [r, g, b] = parse(c); return 0.2126 * r + 0.7152 * g + 0.0722 * b };
        const ground = light(getComputedStyle(document.body).backgroundColor);
        return ['body', '.note', 'nav a', 'figcaption', 'thead th'].map(name => {
            const ink = light(getComputedStyle(document.querySelector(name)).color);
            return (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05) })"""
    grounds = set()
    for dark in (False, True):
        browser.open(page, dark=dark)
        assert min(browser.run(script)) >= 4.5
        grounds.add(browser.run("return getComputedStyle(document.body).backgroundColor"))
    assert len(grounds) == 2


def test_page_can_be_read_by_a_screen_reader(browser, page):
    browser.open(page)
    assert browser.run("return document.documentElement.lang") == "en"
    unnamed = """
        return [...document.querySelectorAll('svg')].filter(e => e.getAttribute('aria-hidden') != 'true')
            .filter(e => !(e.getAttribute('aria-labelledby') || '').split(' ')
                .every(i => document.getElementById(i)?.textContent)).length"""
    assert browser.run(unnamed) == 0
    assert browser.run("return [...document.querySelectorAll('table')].every(t => t.caption?.textContent)")
    assert browser.run("return [...document.querySelectorAll('th')].every(t => t.scope)")
    links = "return [...document.querySelectorAll('nav a')].every(a => document.querySelector(a.getAttribute('href')))"
    assert browser.run(links)
