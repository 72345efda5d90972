"""`declutr explore` without a browser: what the map shows, what is answered, to whom nothing is."""

import http.client
import json
import os
import signal
import socket
import threading
import time
from urllib.parse import quote

import numpy as np
import pytest
from exploring import ANIMALS, ENCODER, HOSTILE, HOSTILE_SOURCE, NUM_TEXTS, serving, write_index
from messages import says

from declutr.cli.main import main
from declutr.embedding.index import SearchIndex
from declutr.encoders.loading import load_encoder
from declutr.evaluation.explore.explorer import MAX_QUERY_CHARACTERS, Explorer, fit_plane, sample_rows
from declutr.evaluation.explore.server import TOKEN_HEADER
from declutr.evaluation.report.markup import visible
from declutr.evaluation.report.tally import MAX_GROUPS, Grouping


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return write_index(tmp_path_factory.mktemp("explore"))


@pytest.fixture(scope="module")
def server(index):
    with serving(index) as started:
        yield started


def ask(server, path, host=None, method="GET", token=None, **headers):
    """Status, headers, body."""
    port = server.server_address[1]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.putrequest(method, path, skip_host=True)
        if host != "":
            connection.putheader("Host", host or f"127.0.0.1:{port}")
        if token != "":
            connection.putheader(TOKEN_HEADER, token or server.token)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


def answer(server, path):
    status, headers, body = ask(server, path)
    assert status == 200
    assert headers["Content-Type"] == "application/json"
    return json.loads(body)


def test_the_map_has_every_text_at_its_place_in_its_group(server, index):
    told = answer(server, "/api/map")
    assert told["texts"] == len(told["points"]) == NUM_TEXTS
    assert told["groups"] == ["animals.jsonl", "weather.jsonl", visible(HOSTILE_SOURCE), "other sources"]
    texts = SearchIndex(index).texts(range(NUM_TEXTS))
    for point, text in zip(told["points"], texts, strict=True):
        assert told["groups"][point["group"]] == point["source"] == visible(text.source)
        assert point["text"].rstrip("…") == visible(text.text[:120])
    vectors = SearchIndex(index).vectors(range(NUM_TEXTS)).astype(np.float64)
    centred = vectors - vectors.mean(axis=0)
    left, values, _ = np.linalg.svd(centred, full_matrices=False)
    places = np.array([[point["x"], point["y"]] for point in told["points"]])
    np.testing.assert_allclose(np.abs(places), np.abs(left[:, :2] * values[:2]), atol=2e-5)
    assert told["share"] == pytest.approx((values[:2] ** 2).sum() / (values**2).sum(), abs=1e-4)


def test_a_query_finds_what_search_finds_and_lies_where_its_text_lies(server, index):
    told = answer(server, f"/api/search?text={quote(ANIMALS[4])}")
    expected = SearchIndex(index).search(load_encoder(ENCODER), ANIMALS[4])
    assert [(hit["row"], hit["text"]) for hit in told["hits"]] == [(hit.row, visible(hit.text)) for hit in expected]
    assert [hit["score"] for hit in told["hits"]] == pytest.approx([hit.score for hit in expected], abs=1e-5)
    first = told["hits"][0]
    assert first["score"] == pytest.approx(1, abs=1e-5)
    assert told["query"] == pytest.approx({"x": first["x"], "y": first["y"]}, abs=1e-4)


def test_neighbours_of_a_text_leave_itself_out(server, index):
    told = answer(server, "/api/neighbours?row=4")
    every = SearchIndex(index).search(load_encoder(ENCODER), SearchIndex(index).texts([4])[0].text, 11)
    assert told["text"]["row"] == every[0].row == 4
    assert [hit["row"] for hit in told["hits"]] == [hit.row for hit in every[1:]]


def test_hostile_text_comes_as_text_that_steers_nothing(server, index):
    row = next(text.row for text in SearchIndex(index).texts(range(NUM_TEXTS)) if text.text == HOSTILE)
    told = answer(server, f"/api/neighbours?row={row}")["text"]
    assert told["text"] == visible(HOSTILE)
    assert told["text"].startswith("<script>")
    assert not set(told["text"] + told["source"]) & set("\u202e\u2066\x1b")


def test_map_of_a_large_index_draws_some_texts_and_places_all_hits(index):
    explorer = Explorer(SearchIndex(index), load_encoder(ENCODER), top=NUM_TEXTS, map_texts=5)
    points = explorer.map()["points"]
    assert [point["row"] for point in points] == sample_rows(NUM_TEXTS, 5)
    hits = {hit["row"]: hit for hit in explorer.search("the cat sat")["hits"]}
    assert len(hits) == NUM_TEXTS
    assert all((hits[point["row"]]["x"], hits[point["row"]]["y"]) == (point["x"], point["y"]) for point in points)
    assert max(hit["group"] for hit in hits.values()) < len(explorer.map()["groups"])


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/api/search?text=", 400, "empty"),
        ("/api/search?text=%20", 400, "empty"),
        ("/api/search", 400, "empty"),
        (f"/api/search?text={'x' * (MAX_QUERY_CHARACTERS + 1)}", 400, ("4,001 characters", "4,000")),
        (f"/api/neighbours?row={NUM_TEXTS}", 400, (f"row {NUM_TEXTS}", "index")),
        ("/api/neighbours?row=-1", 400, "a number"),
        ("/api/neighbours?row=%C2%B2", 400, "a number"),
        (f"/api/neighbours?row={'9' * 5000}", 400, "a number"),
        (f"/api/map?{'a=1&' * 9}", 400, "fields"),
        ("/api/other", 404, "not exist"),
        ("/../../etc/passwd", 404, "not exist"),
        ("//[", 404, "not exist"),
        ("http://127.0.0.1/", 404, "not exist"),
    ],
)
def test_question_without_an_answer_is_refused(server, path, status, words):
    found, _, body = ask(server, path)
    assert found == status
    says(json.loads(body)["error"], words)


def test_a_query_as_long_as_may_be_is_answered(server):
    assert answer(server, f"/api/search?text={quote('🦊' * MAX_QUERY_CHARACTERS)}")["hits"]


@pytest.mark.parametrize("path", ["/", "/api/map", "/api/search?text=cat"])
@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "127.0.0.1.evil.example",
        "localhost.evil.example:80",
        "evil.example:PORT",
        "",
        "0.0.0.0",
        "127.0.0.1",
        "127.0.0.1:9",
        "127.0.0.1:PORT.",
        "127.0.0.1.:PORT",
        "localhost.:PORT",
        "LOCALHOST:PORT",
        "127.1:PORT",
        "2130706433:PORT",
        "[::1]:PORT",
        "127.0.0.1:0PORT",
        "user@127.0.0.1:PORT",
        "127.0.0.1:PORT,evil.example",
    ],
)
def test_names_that_were_made_to_point_here_are_refused(server, path, host):
    status, headers, body = ask(server, path, host=host.replace("PORT", str(server.server_address[1])))
    assert status == 421
    says(json.loads(body)["error"], "address", "`declutr explore`")
    assert server.token not in body.decode()
    assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize("path", ["/", "/api/map", "/api/search?text=cat", "/api/neighbours?row=1", "/api/other"])
@pytest.mark.parametrize("token", ["", "x", "é", "TOKEN ", "TOKENx", "token", "TOKE"])
def test_without_the_token_nobody_reads_anything(server, path, token):
    """Another user of the machine reaches the port; the token is only in the address that was printed."""
    wrong = token.replace("TOKEN", server.token).replace("TOKE", server.token[:-1])
    wrong = wrong if wrong != f"{server.token} " else f"{server.token} x"  # HTTP takes off the space
    for found in (ask(server, path, token=wrong), ask(server, f"{path}?token={quote(wrong)}", token="")):
        assert found[0] == 403
        says(json.loads(found[2])["error"], "token", "missing", "wrong")
        assert server.token not in found[2].decode()
    assert ask(server, f"/api/map?token={server.token}", token="")[0] == 403  # in an address, for the page alone
    assert ask(server, f"/?token={server.token}", token="")[0] == 200


def test_connections_that_say_nothing_have_an_end(index):
    """More than there are threads for: the next are closed, and those who ended make room again."""
    with serving(index) as server:
        held = [socket.create_connection(server.server_address, timeout=20) for _ in range(64)]
        end = time.monotonic() + 20
        while threading.active_count() < 64 and time.monotonic() < end:
            time.sleep(0.01)
        with pytest.raises(OSError, match=r"reset|closed|Remote end"):
            ask(server, "/")
        for connection in held:
            connection.close()
        while time.monotonic() < end:
            try:
                assert ask(server, "/")[0] == 200
            except OSError:
                time.sleep(0.01)
            else:
                break
        assert ask(server, "/")[0] == 200


def test_this_machine_is_served_and_other_sites_are_not(server):
    """A link from elsewhere that has the token opens the page, but no script there reads it."""
    assert ask(server, "/api/map", host=f"localhost:{server.server_address[1]}")[0] == 200
    assert ask(server, "/api/map", Sec_Fetch_Site="same-origin")[0] == 200
    assert ask(server, "/api/map", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors")[0] == 403
    assert ask(server, "/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")[0] == 200
    assert ask(server, "/", method="POST")[0] == 501
    assert server.socket.getsockname()[0] == "127.0.0.1"


def test_the_page_holds_all_it_needs_and_may_run_nothing_else(server):
    status, headers, body = ask(server, "/")
    assert status == 200
    page = body.decode()
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert f'maxlength="{MAX_QUERY_CHARACTERS}"' in page
    assert "innerHTML" not in page
    assert not [word for word in ("/* style */", "/* script */", "https://", "@import", "url(") if word in page]


def test_errors_are_for_people(index, tmp_path, capsys):
    assert main(["explore", str(tmp_path / "nowhere")]) == 1
    says(capsys.readouterr().err, "not an index")
    assert main(["explore", str(index), "--model", "hashed-words@1:64"]) == 1
    assert f"made with {ENCODER}" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["explore", str(index), "--port", str(taken.getsockname()[1])]) == 1
    says(capsys.readouterr().err, "--port", "free port")
    with pytest.raises(SystemExit):
        main(["explore", str(index), "--port", "70000"])


def test_explore_prints_its_address_and_ends_on_ctrl_c(index, capsys):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def interrupt():
        end = time.monotonic() + 20
        while time.monotonic() < end:
            try:  # an answer, because the address is open before the encoder is loaded
                with socket.create_connection(("127.0.0.1", port), timeout=20) as asking:
                    asking.sendall(b"GET / HTTP/1.0\r\n\r\n")
                    assert asking.recv(5) == b"HTTP/"
            except OSError:
                time.sleep(0.02)
            else:
                os.kill(os.getpid(), signal.SIGINT)
                return

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in a background job
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        assert main(["explore", str(index), "--port", str(port)]) == 0
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert f"http://127.0.0.1:{port}/?token=" in capsys.readouterr().out
    with socket.create_server(("127.0.0.1", port)):
        pass  # it is closed


@pytest.mark.parametrize(
    ("sources", "names"),
    [
        (["a.txt"] * 3, ["a.txt"]),
        (
            ["web.tar!b/2", "web.tar!a/1", "web.tar!a/2", "c.txt"],
            ["c.txt", "web.tar!a/1", "web.tar!a/2", "web.tar!b/2"],
        ),
        ([f"web.tar!{n % 3}/{n}" for n in range(20)], ["web.tar!0", "web.tar!1", "web.tar!2"]),
        ([f"web.tar!{n}" for n in range(20)] + ["b.tar!1"], ["web.tar", "b.tar"]),
        (
            [f"{n}.txt" for n in range(20)] + ["7.txt"],
            ["7.txt", "0.txt", "1.txt", *(f"{n}.txt" for n in range(10, 15))],
        ),
        (["", "/", "!"], ["", "/", "!"]),
    ],
)
def test_sources_make_few_groups(sources, names):
    grouping = Grouping(sources)
    assert sorted(grouping.names) == sorted(names)
    assert len(grouping.names) <= MAX_GROUPS
    assert [grouping.number(name) for name in grouping.names] == list(range(len(names)))
    assert {grouping.number(source) for source in sources} <= set(range(len(names) + 1))
    assert grouping.number("never seen") == len(names)


def test_the_plane_is_that_of_the_largest_variance():
    rng = np.random.default_rng(0)
    turned, _ = np.linalg.qr(rng.normal(size=(12, 12)))
    scales = np.array([4, 2, *[0.3] * 10])
    flat = rng.normal(size=(4000, 12)) * scales
    vectors = (flat @ turned.T + 7).astype(np.float32)
    plane = fit_plane(vectors)
    assert np.abs(plane.axes.T @ turned[:, :2]) == pytest.approx(np.eye(2), abs=0.02)
    assert plane.share == pytest.approx((scales[:2] ** 2).sum() / (scales**2).sum(), abs=0.02)
    np.testing.assert_allclose(plane.place(vectors).mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(fit_plane(vectors[::-1]).axes, plane.axes, atol=1e-9)
    one = fit_plane(np.array([[1.0], [3.0]], np.float32))
    assert one.place(np.array([[3.0]], np.float32)).tolist() == [[1.0, 0.0]]
    assert fit_plane(np.ones((1, 3), np.float32)).place(np.ones((1, 3), np.float32)).tolist() == [[0.0, 0.0]]


def test_plane_of_few_wide_vectors_is_the_same_and_small():
    vectors = np.random.default_rng(0).standard_normal((9, 20)).astype(np.float32)
    plane = fit_plane(vectors)
    centred = vectors - vectors.mean(axis=0)
    values = np.linalg.svd(centred, compute_uv=False) ** 2
    assert plane.share == pytest.approx(values[:2].sum() / values.sum(), rel=1e-5)
    np.testing.assert_allclose(plane.axes.T @ plane.axes, np.eye(2), atol=1e-5)
    np.testing.assert_allclose((plane.place(vectors) ** 2).sum(axis=0), values[:2], rtol=1e-4)
    assert fit_plane(np.ones((2, 200_000), np.float32)).share == 1
    for line in (vectors[:2], vectors[[0, 0, 0, 1, 0]]):
        plane = fit_plane(line)
        assert np.linalg.norm(plane.axes, axis=0).tolist() == pytest.approx([1, 0], abs=1e-4)
        assert np.abs(plane.place(line)).max() < 10


def test_rows_are_drawn_by_the_seed_whatever_their_number():
    rows = sample_rows(10**12, 500)
    assert rows == sample_rows(10**12, 500) != sample_rows(10**12, 500, seed=1)
    assert rows == sorted(set(rows))
    assert 0 <= rows[0] < 10**11
    assert 9 * 10**11 < rows[-1] < 10**12
    assert sample_rows(3, 5) == [0, 1, 2]
