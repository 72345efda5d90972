"""The page of `declutr explore` in a real browser."""

import pytest
from exploring import ANIMALS, ENCODER, HOSTILE, NUM_TEXTS, serving, write_index
from messages import says

from declutr.embedding.index import SearchIndex
from declutr.encoders.loading import load_encoder
from declutr.evaluation.report.markup import visible


@pytest.fixture(scope="module")
def index(browser, tmp_path_factory):  # noqa: ARG001 - without a browser nothing needs to be embedded
    return write_index(tmp_path_factory.mktemp("explore"))


@pytest.fixture(scope="module")
def server(index):
    with serving(index) as started:
        yield started


def one(browser, selector):
    return browser.driver.find_element("css selector", selector)


def until(browser, condition, *arguments):
    """Waits until an expression in the page is true; returns its value."""
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser.driver, 20, poll_frequency=0.02).until(
        lambda _: browser.run(f"return {condition}", *arguments)
    )


def open_page(browser, server, hash_="", **window):
    browser.open(f"{server.url}{hash_}", **window)
    until(browser, "document.querySelectorAll('#legend input').length == 3")


def told(browser):
    """What the status line says once the server has answered."""
    until(browser, "!['', 'Looking …', 'Reading the index …'].includes(document.getElementById('status').textContent)")
    return one(browser, "#status").text


ROWS = "[...document.querySelectorAll('#hits li')].map(item => Number(item.dataset.row))"


def rows(browser):
    return browser.run(f"return {ROWS}")


def ask(browser, words):
    from selenium.webdriver.common.keys import Keys

    box = one(browser, "#query")
    box.clear()
    box.send_keys(words, Keys.ENTER)
    assert "to the sentence" in told(browser)


def nearest(index, text, top=10):
    return SearchIndex(index).search(load_encoder(ENCODER), text, top)


INKED = """
    const [canvas, colour] = [document.getElementById('map'), arguments[0]];
    const probe = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
    [probe.canvas.width, probe.canvas.height] = [canvas.width, canvas.height];
    probe.drawImage(canvas, 0, 0);
    const data = probe.getImageData(0, 0, canvas.width, canvas.height).data;
    let inked = 0;
    for (let place = 3; place < data.length; place += 4) inked += data[place] > 0;
    return inked"""
"""Pixels of the map that are not empty."""

ALONE = """
    const found = map.points.find(point => point.group == arguments[0] && map.nearest(...map.place(point)) === point);
    return {row: found.row, text: found.text, place: map.place(found)}"""
"""A point of a group that no other one covers."""


@pytest.mark.slow
def test_a_sentence_finds_its_neighbours_and_has_a_place_on_the_map(browser, server, index):
    open_page(browser, server)
    assert one(browser, "h1").text == ENCODER
    assert f"All {NUM_TEXTS} texts" in one(browser, "#map-note").text
    before = browser.run(INKED)
    assert before > 500
    ask(browser, ANIMALS[4])
    expected = nearest(index, ANIMALS[4])
    assert rows(browser) == [hit.row for hit in expected]
    script = (
        "return [...document.querySelectorAll('#hits li')].map(item => [item.querySelector('.score').textContent,"
        " item.querySelector('.fill').offsetWidth / item.querySelector('.track').offsetWidth,"
        " item.querySelector('.text').textContent])"
    )
    for (score, width, text), hit in zip(browser.run(script), expected, strict=True):
        assert score == f"{hit.score:.3f}"
        assert width == pytest.approx(max(0.0, hit.score), abs=0.01)
        assert text == visible(hit.text)[: len(text)]
    # The query's star lies on the best hit, whose text it is.
    assert browser.run("return map.place(map.origin)") == pytest.approx(
        browser.run("return map.place(map.hits[0])"), abs=0.1
    )
    assert browser.run(INKED) > before
    assert browser.messages() == []
    assert all(url.startswith((server.url.partition("?")[0], "data:,")) for url in browser.requests())


def test_hybrid_hits_show_both_parts_of_their_scores(browser, tmp_path):
    index = write_index(tmp_path, "--hybrid", "--weight", "0.5")
    with serving(index) as server:
        open_page(browser, server)
        assert "cosine + 0.5 × score of words" in one(browser, "#facts").text
        ask(browser, ANIMALS[4])
        shown = browser.run(
            "return [...document.querySelectorAll('#hits li')].map(item => [item.querySelector('.score').textContent,"
            " item.querySelector('.fill').offsetWidth / item.querySelector('.track').offsetWidth])"
        )
        for (score, width), hit in zip(shown, nearest(index, ANIMALS[4]), strict=True):
            assert score == f"{hit.score:.3f} = {hit.cosine:.3f} + 0.5 × {hit.lexical:.3f}"
            assert width == pytest.approx(max(0.0, hit.score) / 1.5, abs=0.01)
        assert browser.messages() == []


def test_a_source_goes_and_comes_back_with_its_points(browser, server):
    open_page(browser, server)
    before = browser.run(INKED)
    point = browser.run(ALONE, 0)
    box = one(browser, "#legend input")
    box.click()
    assert browser.run("return map.nearest(...arguments[0])?.group", point["place"]) != 0
    assert browser.run(INKED) < 0.8 * before
    box.click()
    assert browser.run(INKED) == before


def test_a_point_shows_its_text_and_a_click_its_neighbours(browser, server, index):
    from selenium.webdriver.common.action_chains import ActionChains

    open_page(browser, server)
    point = browser.run(ALONE, 1)
    canvas = one(browser, "#map")
    width, height = browser.boxes("#map")[0]
    x, y = (round(place - half) for place, half in zip(point["place"], (width / 2, height / 2), strict=True))
    pointer = ActionChains(browser.driver, duration=0).move_to_element_with_offset(canvas, x, y)
    pointer.perform()
    assert point["text"] in one(browser, "#tip").text
    assert "weather.jsonl" in one(browser, "#tip").text
    pointer.click().perform()
    assert "the chosen one" in told(browser)
    assert one(browser, "#chosen blockquote").text == point["text"]
    assert rows(browser) == [hit.row for hit in nearest(index, point["text"], 11) if hit.row != point["row"]]
    # A hit in the list lights up on the map, and leads on.
    ActionChains(browser.driver, duration=0).move_to_element(one(browser, "#hits li")).perform()
    first = rows(browser)[0]
    assert browser.run("return map.current.row") == first
    one(browser, "#hits button").click()
    until(browser, f"location.hash == '#row={first}' && !{ROWS}.includes({first})")
    assert browser.run("return document.activeElement.id") == "chosen"
    browser.driver.back()
    until(browser, f"{ROWS}[0] == {first}")
    assert browser.messages() == []


def test_page_works_by_keyboard_alone(browser, server):
    from selenium.webdriver.common.keys import Keys

    open_page(browser, server)
    one(browser, "#query").send_keys("rain over sea", Keys.ENTER)
    told(browser)
    best = rows(browser)[0]
    active = browser.driver.switch_to.active_element
    active.send_keys(Keys.TAB, Keys.TAB)
    assert browser.run("return document.activeElement.id") == "map"
    canvas = browser.driver.switch_to.active_element
    canvas.send_keys(Keys.ARROW_RIGHT)
    assert browser.run("return map.current.row") == best
    assert one(browser, "#tip").is_displayed()
    visited = set()
    for key in (Keys.ARROW_LEFT, Keys.ARROW_DOWN, Keys.ARROW_UP, Keys.ARROW_RIGHT) * 2:
        old = browser.run("return map.place(map.current)")
        canvas.send_keys(key)
        new = browser.run("return map.place(map.current)")
        along = {Keys.ARROW_LEFT: old[0] - new[0], Keys.ARROW_RIGHT: new[0] - old[0], Keys.ARROW_UP: old[1] - new[1]}
        assert along.get(key, new[1] - old[1]) >= 0
        visited.add(browser.run("return map.current.row"))
    assert len(visited) > 2
    canvas.send_keys("+", "+")
    assert browser.run("return map.view.zoom") == 2.25
    canvas.send_keys("0", Keys.ARROW_LEFT)
    row = browser.run("return map.current.row")
    canvas.send_keys(Keys.ENTER)
    until(browser, f"location.hash == '#row={row}'")
    assert "the chosen one" in told(browser)


def test_hostile_texts_stay_texts(browser, server, index):
    open_page(browser, server)
    row = next(text.row for text in SearchIndex(index).texts(range(NUM_TEXTS)) if text.text == HOSTILE)
    open_page(browser, server, f"#row={row}")
    told(browser)
    assert browser.run("return document.querySelector('#chosen blockquote').textContent") == visible(HOSTILE)
    ask(browser, HOSTILE[:40] + " zebra <b>x</b>")
    assert row in rows(browser)
    browser.run("map.point(map.hits[0])")
    assert (
        browser.run("return document.querySelectorAll('blockquote *, .text *, .source *, .name *, main img').length")
        == 0
    )
    assert browser.run("return document.querySelectorAll('script').length") == 1
    assert browser.run("return document.title") == f"Explore {ENCODER}"
    assert browser.messages() == []


def test_wrong_question_is_answered_on_the_page(browser, server, index):
    open_page(browser, server)
    one(browser, "#ask button").click()
    until(browser, "document.getElementById('status').classList.contains('wrong')")
    assert "type a sentence" in told(browser)
    open_page(browser, server, "#row=999999")
    says(told(browser), "row 999,999", "index")
    with serving(index, map_texts=5) as short:
        browser.open(short.url)
        until(browser, "document.getElementById('map-note').textContent")
        says(one(browser, "#map-note").text, "5 texts", NUM_TEXTS, "random")
    one(browser, "#query").send_keys("gone\n")
    until(browser, "document.getElementById('status').textContent.startsWith('No answer')")


@pytest.mark.parametrize("width", [320, 768, 1200])
def test_nothing_overflows_or_moves(browser, server, width):
    open_page(browser, server, width=width)
    top = "return document.getElementById(arguments[0]).getBoundingClientRect().top + scrollY"
    first = "map" if width > 896 else "found"  # on a narrow screen results are above the map
    before = browser.run(top, "ask"), browser.run(top, "status"), browser.run(top, "map")
    assert browser.overflow() == 0
    ask(browser, "cat " * 60)
    browser.run("map.point(map.points.reduce((a, b) => map.place(a)[0] > map.place(b)[0] ? a : b))")
    assert browser.overflow() == 0
    assert (browser.run(top, "ask"), browser.run(top, "status")) == before[:2]
    assert (browser.run(top, "map") == before[2]) == (first == "map")
    assert (browser.run(top, "found") < browser.run(top, "atlas")) == (first == "found")
    assert browser.run(top, first) <= before[2]
    if width < 800:
        assert browser.boxes("#map")[0][0] > 0.85 * width


@pytest.mark.slow
def test_dark_and_light_have_enough_contrast(browser, server):
    """WCAG AA: 4.5 between text and ground, 3 between points and the map."""
    script = """
        const style = getComputedStyle(document.documentElement);
        const probe = document.createElement('canvas').getContext('2d');
        const light = c => {
            probe.fillStyle = c;
            const [r, g, b] = [1, 3, 5].map(i => parseInt(probe.fillStyle.slice(i, i + 2), 16) / 255)
                .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b };
        const contrast = (ink, ground) => { const [a, b] = [ink, ground].map(n => light(style.getPropertyValue(n)));
            return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) };
        return [['--ink', '--muted', '--failed', '--link'].map(n => contrast(n, '--ground')),
            ['--others', ...[0, 1, 2, 3, 4, 5, 6, 7].map(n => `--group-${n}`)].map(n => contrast(n, '--panel'))]"""
    for dark in (False, True):
        open_page(browser, server, dark=dark)
        texts, points = browser.run(script)
        assert min(texts) >= 4.5
        assert min(points) >= 3
