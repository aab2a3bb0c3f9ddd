"""The page of a node: who may ask what, and what it costs. tests/node/ops/test_page.py has it in a browser."""

import asyncio
import hashlib
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any

import aiohttp
import msgspec
import pytest
from support.figures import PEER, STATUS
from support.repository import ROOT
from support.waiting import until

from primerl.node.errors import BusyError, NodeError, UsageError
from primerl.node.ops.dashboard import Dashboard, DashboardLimits, Query
from primerl.node.ops.figures import Curves, NodeFigures, PeerRow

QUICK = DashboardLimits(every_s=0.01, share=1.0, viewers=3, answer_s=0.2)


class FakeNode:
    """A node whose figures are made up, and counted."""

    def __init__(self, *peers: PeerRow) -> None:
        self.rows = list(peers)
        self.made = 0
        self.steps = [1]
        self.queries: Mapping[str, Query] = {
            "double": self.double,
            "refuse": self.refuse,
            "hang": self.hang,
        }

    async def figures(self) -> NodeFigures:
        self.made += 1
        return NodeFigures(float(self.made), STATUS, self.rows)

    def curves(self) -> Curves:
        return Curves(self.steps, {"reward/mean": [0.5] * len(self.steps)})

    async def double(self, number: str) -> int:
        return 2 * int(number)

    async def refuse(self) -> None:
        raise UsageError("not today")

    async def hang(self) -> None:
        await asyncio.Event().wait()


class Browser:
    """A page's client, with the token of its link."""

    def __init__(self, dashboard: Dashboard, session: aiohttp.ClientSession) -> None:
        self.url, _, self.token = dashboard.link.partition("#token=")
        self.session = session

    def get(self, path: str, headers: Mapping[str, str] | None = None, **more: Any) -> Any:
        with_token = {"Authorization": f"Bearer {self.token}"}
        return self.session.get(self.url + path, headers={**with_token, **(headers or {})}, **more)

    async def status(self, path: str, headers: Mapping[str, str] | None = None) -> int:
        async with self.get(path, headers) as reply:
            return reply.status

    async def events(self, reply: Any, count: int) -> list[tuple[str, Any]]:
        """Read `count` events of a stream."""
        events: list[tuple[str, Any]] = []
        while len(events) < count:
            name = (await reply.content.readline()).decode().removeprefix("event: ").strip()
            data = await reply.content.readline()
            assert await reply.content.readline() == b"\n"
            events.append((name, json.loads(data.removeprefix(b"data: "))))
        return events


@pytest.fixture
def node() -> FakeNode:
    return FakeNode(PEER)


@pytest.fixture
async def dashboard(node: FakeNode) -> AsyncIterator[Dashboard]:
    page = Dashboard(node, 0, QUICK)
    page.open()
    yield page
    await page.close()


@pytest.fixture
async def browser(dashboard: Dashboard) -> AsyncIterator[Browser]:
    async with aiohttp.ClientSession(read_bufsize=1 << 24) as session:
        yield Browser(dashboard, session)


async def test_a_viewer_gets_figures_again_and_again_and_curves_when_there_are_new_ones(
    node: FakeNode, browser: Browser
) -> None:
    async with browser.get("events") as reply:
        first, curves, second = await browser.events(reply, 3)
        assert [first[0], curves[0], second[0]] == ["figures", "curves", "figures"]
        assert msgspec.convert(first[1], NodeFigures).peers == [PEER]
        assert first[1]["status"]["run_name"] == "demo"
        assert second[1]["time"] > first[1]["time"]
        node.steps = [1, 2]
        while (event := (await browser.events(reply, 1))[0])[0] == "figures":
            pass
        assert event[1]["steps"] == [1, 2]


async def test_the_empty_page_runs_no_code_but_its_own_and_is_shown_in_no_frame(
    browser: Browser,
) -> None:
    for path in ("", "page.js", "charts.js", "page.css", "uplot.js", "uplot.css"):
        async with browser.session.get(browser.url + path) as reply:
            text, policy = await reply.text(), reply.headers["Content-Security-Policy"]
            assert reply.status == 200
            assert "unsafe" not in policy
            assert "default-src 'none'" in policy
            assert "frame-ancestors 'none'" in policy
            assert reply.headers["Cache-Control"] == "no-store"
            for word in ("innerHTML", "eval(", "http://", "https://", 'style="', "onclick="):
                assert word not in text.removeprefix("/*! https://github.com/leeoniya/uPlot")


def test_what_draws_the_charts_is_a_release_of_uplot_unchanged() -> None:
    """Digests of the npm package 1.6.32: dist/uPlot.iife.min.js, dist/uPlot.min.css, LICENSE."""
    digests = {
        "uplot.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
        "uplot.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
        "uplot.LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
    }
    for name, digest in digests.items():
        data = (ROOT / "node/ops/page" / name).read_bytes()
        assert hashlib.sha256(data).hexdigest() == digest, name


@pytest.mark.parametrize("path", ["events", "api/double?number=2", "api/other"])
async def test_without_the_token_nothing_is_told(browser: Browser, path: str) -> None:
    query = "&" if "?" in path else "?"
    wrong = ({"Authorization": ""}, {"Authorization": "Bearer x"}, {"Authorization": browser.token})
    for headers in wrong:
        assert await browser.status(path, headers) == 401
    # a token in an address would be in histories and logs; a cookie goes to other ports of the machine
    assert await browser.status(f"{path}{query}token={browser.token}", wrong[0]) == 401
    assert await browser.status(path, {**wrong[0], "Cookie": f"token={browser.token}"}) == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "attacker.example"},
        {"Host": "127.0.0.1.attacker.example:80"},
        {"Host": "[::1"},
        {"Origin": "http://attacker.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
async def test_another_page_gets_nothing_even_with_the_token(
    browser: Browser, headers: dict[str, str]
) -> None:
    for path in ("", "page.js", "events", "metrics", "api/double?number=2"):
        assert await browser.status(path, headers) == 403


async def test_a_tunnel_to_the_page_works_under_its_own_port(browser: Browser) -> None:
    for host in ("127.0.0.1:8470", "localhost:8470", "[::1]:8470"):
        own = {"Host": host, "Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}
        assert await browser.status("api/double?number=2", own) == 200


async def test_the_page_can_only_ask(browser: Browser) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        for path in ("", "events", "metrics", "api/double"):
            headers = {"Authorization": f"Bearer {browser.token}"}
            async with browser.session.request(
                method, browser.url + path, headers=headers
            ) as reply:
                assert reply.status == 405


async def test_a_question_is_answered_or_refused_with_a_line(browser: Browser) -> None:
    async with browser.get("api/double?number=21") as reply:
        assert await reply.json() == 42
    for path, status, words in (
        ("api/stop", 404, "no such question"),
        ("api/refuse", 400, "not today"),
        ("api/double", 400, "number"),
        ("api/double?number=x", 400, "invalid"),
        ("api/double?number=1&number2=2", 400, "number2"),
        ("api/hang", 503, "in time"),
    ):
        async with browser.get(path) as reply:
            assert (reply.status, words in await reply.text()) == (status, True)


async def test_viewers_are_bounded_and_one_that_leaves_makes_room(browser: Browser) -> None:
    replies = [await browser.get("events") for _ in range(QUICK.viewers)]
    assert await browser.status("events") == 503
    assert await browser.status("api/double?number=1") == 200
    replies[0].close()
    await _has_room(browser)
    for reply in replies:
        reply.close()


async def _has_room(browser: Browser) -> None:
    """Wait until there is room for another viewer."""
    async with asyncio.timeout(60):
        while await browser.status("events") != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("read_s", [0.2, 600.0])
async def test_a_viewer_that_does_not_read_is_dropped_and_keeps_nobody_waiting(
    node: FakeNode, read_s: float
) -> None:
    # more than the buffers of a connection hold
    node.rows = [msgspec.structs.replace(PEER, software="x" * 65536)] * 300
    viewers = 1 if read_s < 1 else 2
    page = Dashboard(node, 0, DashboardLimits(0.01, 1.0, viewers, read_s))
    page.open()
    with socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        async with aiohttp.ClientSession(read_bufsize=1 << 24) as session:
            browser = Browser(page, session)
            silent.connect(("127.0.0.1", int(page.url.rstrip("/").rpartition(":")[2])))
            head = (
                f"GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {browser.token}"
            )
            silent.sendall(f"{head}\r\n\r\n".encode())
            await until(lambda: node.made > 0)
            node.rows = []
            if read_s < 1:
                await _has_room(browser)
            else:
                async with browser.get("events") as reply:
                    while len((await browser.events(reply, 1))[0][1].get("peers", "x")) > 0:
                        pass
                    assert len(await browser.events(reply, 3)) == 3
    await page.close()


def _connect(page: Dashboard, said: bytes = b"", address: str = "127.0.0.1") -> socket.socket:
    """Connect from an address of this machine, send some bytes, and read nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.bind((address, 0))
    client.connect(("127.0.0.1", int(page.url.rstrip("/").rpartition(":")[2])))
    client.sendall(said)
    client.setblocking(False)
    return client


async def _hung_up_on(client: socket.socket) -> None:
    """Wait until the page has ended a connection, whatever it sent before."""
    loop = asyncio.get_running_loop()
    with suppress(ConnectionError):
        async with asyncio.timeout(60):
            while await loop.sock_recv(client, 1 << 16):
                pass


@pytest.mark.parametrize("public", ["", "127.0.0.1"])
@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HT",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Long: ",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n1",
    ],
)
async def test_a_connection_that_makes_no_whole_request_ends(
    node: FakeNode, said: bytes, public: str
) -> None:
    page = Dashboard(node, 0, DashboardLimits(idle_s=0.3), public)
    page.open()
    with _connect(page, said) as silent, _connect(page, said) as slow:
        await until(lambda: page.connections == 2)

        async def drip() -> None:
            while True:
                await asyncio.get_running_loop().sock_sendall(slow, b"x")
                await asyncio.sleep(0.05)

        dripping = asyncio.create_task(drip())
        await _hung_up_on(silent)
        await _hung_up_on(slow)
        await until(lambda: page.connections == 0)
        dripping.cancel()
        with suppress(asyncio.CancelledError, ConnectionError):
            await dripping
    await page.close()


async def test_one_that_asks_for_more_than_it_reads_ends(node: FakeNode) -> None:
    page = Dashboard(node, 0, DashboardLimits(idle_s=0.3))
    page.open()
    asked = b"GET /uplot.js HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 50
    with _connect(page, asked):
        await until(lambda: page.connections == 1)
        await until(lambda: page.connections == 0)
    await page.close()


async def test_a_request_that_is_answered_for_long_is_no_idle_connection(node: FakeNode) -> None:
    page = Dashboard(node, 0, DashboardLimits(every_s=0.01, share=1.0, idle_s=0.2))
    page.open()
    async with aiohttp.ClientSession(read_bufsize=1 << 24) as session:
        browser = Browser(page, session)
        with _connect(page) as silent:
            async with browser.get("events") as reply:
                await browser.events(reply, 2)
                await _hung_up_on(silent)  # opened later, and its time is up
                assert len(await browser.events(reply, 3)) == 3
    await page.close()


async def test_who_opens_all_connections_and_says_nothing_keeps_nobody_else_out(
    node: FakeNode,
) -> None:
    page = Dashboard(node, 0, DashboardLimits(0.01, 1.0, connections=8, idle_s=600.0), "127.0.0.1")
    page.open()
    flood = [_connect(page) for _ in range(30)]
    for client in flood[:22]:
        await _hung_up_on(client)
    assert page.connections == 8
    neighbour = _connect(page, address="127.0.0.3")
    connector = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))
    async with aiohttp.ClientSession(connector=connector, read_bufsize=1 << 24) as session:
        browser = Browser(page, session)
        async with browser.get("events") as reply:
            flood += [_connect(page) for _ in range(30)]
            assert len(await browser.events(reply, 5)) == 5
            assert await browser.status("") == 200
    with pytest.raises(BlockingIOError):
        neighbour.recv(1)  # it was not ended in the place of one of the flood
    for client in (*flood, neighbour):
        client.close()
    await page.close()


async def test_who_takes_the_places_of_all_viewers_loses_one_to_another_address(
    node: FakeNode,
) -> None:
    page = Dashboard(node, 0, DashboardLimits(0.01, 1.0, viewers=3), "127.0.0.1")
    page.open()
    asked = b"GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    async with aiohttp.ClientSession(read_bufsize=1 << 24) as session:
        browser = Browser(page, session)
        replies = [await browser.get("events") for _ in range(3)]
        with _connect(page, asked, "127.0.0.2") as other, _connect(page, asked, "127.0.0.3"):
            assert (await asyncio.get_running_loop().sock_recv(other, 64)).startswith(
                b"HTTP/1.1 200"
            )
            with suppress(aiohttp.ClientError):
                async with asyncio.timeout(60):
                    while await replies[0].content.readany():  # the oldest
                        pass
            assert len(await browser.events(replies[2], 3)) == 3
            assert await browser.status("events") == 503  # it has as many as any other
        for reply in replies:
            reply.close()
    await page.close()


async def test_figures_are_made_once_for_all_viewers_and_not_without_one(node: FakeNode) -> None:
    slow = Dashboard(node, 0, DashboardLimits(every_s=60.0))
    slow.open()
    async with aiohttp.ClientSession() as session:
        browser = Browser(slow, session)
        assert await browser.status("") == 200
        assert node.made == 0
        for _ in range(5):
            async with browser.get("events") as reply:
                await browser.events(reply, 2)
        assert node.made == 1
    await slow.close()


async def test_a_node_whose_figures_take_long_makes_them_more_rarely() -> None:
    class BusyNode(FakeNode):
        async def figures(self) -> NodeFigures:
            await asyncio.sleep(0.02)
            return await super().figures()

    busy = BusyNode()
    page = Dashboard(busy, 0, DashboardLimits(every_s=0.0, share=1e-4))
    page.open()
    async with aiohttp.ClientSession() as session:
        browser = Browser(page, session)
        for _ in range(5):
            async with browser.get("events") as reply:
                await browser.events(reply, 2)
    assert busy.made == 1
    await page.close()


async def test_a_node_that_ends_hangs_up_on_its_viewers(
    dashboard: Dashboard, browser: Browser
) -> None:
    async with browser.get("events") as reply:
        await browser.events(reply, 2)
        async with asyncio.timeout(10):
            await dashboard.close()
    with pytest.raises(NodeError, match=r"--dashboard\.port"):
        _ = dashboard.link


async def test_a_page_that_nobody_opens_loads_no_server() -> None:
    program = """if True:
        import asyncio, sys
        from primerl.node.ops.dashboard import Dashboard
        async def main():
            page = Dashboard(None, 0)
            page.open()
            await asyncio.sleep(0)
            await page.close()
            assert page.url == ""
            print(sorted({"aiohttp", "prometheus_client", "psutil"} & sys.modules.keys()))
        asyncio.run(main())"""
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


async def test_a_port_that_is_taken_is_named_and_off_is_off(dashboard: Dashboard) -> None:
    port = int(dashboard.url.rstrip("/").rpartition(":")[2])
    with pytest.raises(BusyError, match=rf"port {port}.*--dashboard\.port"):
        Dashboard(FakeNode(), port).open()
    off = Dashboard(FakeNode(), "off")
    off.open()
    assert off.url == ""
    await off.close()
