"""The page of a node in a real Chromium: what it shows, and what strangers' text cannot do to it."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace
from support.figures import PEER, TRAINER, WORKER

from primerl.node.ops.dashboard import Dashboard, DashboardLimits, Query
from primerl.node.ops.figures import (
    Curves,
    LimitsRow,
    NodeFigures,
    PeerRow,
    PublicFigures,
    Status,
    public_figures,
)

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None, reason="needs Debian's chromium: apt-get install chromium"
    ),
]
HOSTILE = (
    "<img src=x onerror=\"document.title='owned'\">",
    "</td><script>document.title='owned'</script>",
    "\u202eevil\u2066 \x1b[31m\x00",
    "x" * 65536,
    "{{constructor.constructor('document.title=1')()}}",
)


class ShownNode:
    """A node with made-up figures."""

    def __init__(self, status: Status, *peers: PeerRow) -> None:
        self.status = status
        self.rows = list(peers)
        self.steps = 100
        self.rewards: tuple[str, ...] = ("mean",)
        self.queries: Mapping[str, Query] = {
            "verdicts": self.verdicts,
            "audits": self.audits,
            "ticket": self.ticket,
            "log": self.log,
            "rollouts": self.rollouts,
            "rollout": self.rollout,
        }

    async def figures(self) -> NodeFigures:
        return NodeFigures(0.0, self.status, self.rows)

    def curves(self) -> Curves:
        steps = list(range(1, self.steps + 1))
        values: dict[str, list[float | None]] = {"loss/mean": [None, *steps[1:]]}
        for name in self.rewards:
            values[f"reward/{name}"] = [step / 100 for step in steps]
        return Curves(steps, values)

    async def verdicts(self, peer: str) -> list[dict[str, object]]:
        line = {"number": 7, "lease": 3, "accepted": 1, "rejected": 2, "audited": 1, "fault": ""}
        return [{**line, "reason": "bad_reward", "worker": peer}]

    async def audits(self) -> list[Mapping[str, object]]:
        measure = {"name": "fingerprint", "value": 1.25, "suspect": 0.05, "reject": 0.1}
        line = {"number": 9, "worker": PEER.id, "audited": 3, "rollouts": 4, "tokens": 185}
        line |= {"validator": "", "version": 7, "measure": measure, "result": "rejected"}
        clean: Mapping[str, object] = {
            **line,
            "result": "clean",
            "measure": None,
            "version": -1,
            "reason": "",
        }
        reasons = ("wrong_model: fingerprint is 1.25", *HOSTILE)
        return [*({**line, "reason": reason} for reason in reasons), clean]

    async def ticket(self) -> dict[str, object]:
        return {"ticket": "primerl1-abc", "expires": 2e9}

    async def log(self) -> list[dict[str, object]]:
        return [{"time": 1.0, "level": "error", "logger": "x", "message": text} for text in HOSTILE]

    async def rollouts(self, step: str = "") -> dict[str, object]:
        row = {
            "place": "4/0/0",
            "environment": HOSTILE[0],
            "verdict": "rejected",
            "advantage": None,
        }
        row |= {"reason": "bad_reward", "reward": 1.0, "worker": "ab" * 32, "detail": HOSTILE[1]}
        return {"steps": [3, 4], "step": int(step or 4), "rollouts": [row], "more": 9}

    async def rollout(self, place: str) -> list[dict[str, object]]:
        return [{"place": place, "parts": [[text, at % 2] for at, text in enumerate(HOSTILE)]}]


@pytest.fixture
async def chromium(tmp_path: Any) -> AsyncIterator[Any]:
    """A browser context at 1280 x 900; `problems` collects errors and whatever the page logs."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        context = await playwright.chromium.launch_persistent_context(
            tmp_path / "profile",
            executable_path=CHROMIUM,
            args=ARGUMENTS,
            viewport={"width": 1280, "height": 900},
        )
        yield context
        await context.close()


@pytest.fixture
async def node() -> ShownNode:
    return ShownNode(TRAINER, PEER, replace(PEER, id="01" * 32, short="0101010101", trust=0.4))


def note(problems: list[str], message: Any) -> None:
    """Write down what a page logs, or fails with."""
    problems.append(str(getattr(message, "text", message)))


async def opened(context: Any, node: ShownNode, problems: list[str]) -> tuple[Dashboard, Any]:
    """Serve a node and open its link."""
    dashboard = Dashboard(node, 0, DashboardLimits(every_s=0.1))
    dashboard.open()
    page = await context.new_page()
    page.on("console", partial(note, problems))
    page.on("pageerror", partial(note, problems))
    await page.goto(dashboard.link)
    await page.wait_for_selector("#tiles div")
    return dashboard, page


async def test_an_operator_sees_the_run_and_its_peers_live(chromium: Any, node: ShownNode) -> None:
    problems: list[str] = []
    dashboard, page = await opened(chromium, node, problems)
    assert await page.title() == "demo - primerl-node"
    assert "token" not in page.url
    assert "Waiting: 12 of 16 groups are in" in await page.inner_text("#waiting")
    tiles = await page.inner_text("#tiles")
    for words in ("3 of 10", "14 s", "0.002", "9000", "1.50 cores"):
        assert words in tiles
    chart = await page.get_attribute("#charts [role=img]", "aria-label")
    assert chart.startswith("Reward: step 1 to 100")
    assert await page.text_content("#charts .u-legend") == "step100mean1"
    node.steps = 110
    await page.locator("#charts .u-legend", has_text="step110").first.wait_for()
    assert await page.locator("#charts canvas").count() == 2
    drawn = "[...document.querySelectorAll('canvas')].map((c) => c.toDataURL().length)"
    assert min(await page.evaluate(drawn)) > 5000
    node.status = replace(TRAINER, step=4, waiting_for="")
    await page.locator("#tiles", has_text="4 of 10").wait_for()
    assert await page.is_hidden("#waiting")

    await page.click("nav a[href='#peers']")
    await page.wait_for_selector("#table tbody tr")
    assert "2 of 2" in await page.inner_text("#count")
    assert "trainer\tababababab\t3.0 kB\t7" in await page.inner_text("#flows")
    await page.click("th button:has-text('Trust')")
    assert (await page.inner_text("#table tbody tr")).startswith("0101010101")
    await page.fill("#filter", "abab")
    assert await page.locator("#table tbody tr").count() == 1
    await page.keyboard.press("Tab")
    await page.click("#table tbody a")
    await page.wait_for_selector("#verdicts td")
    assert "bad_reward" in await page.inner_text("#verdicts")
    assert PEER.id in await page.inner_text("#peer-facts")

    await page.click("nav a[href='#audits']")
    await page.wait_for_selector("#audit-table td")
    cells = (await page.inner_text("#audit-table tbody tr")).split("\t")
    assert cells[:4] == ["9", "ababababab", "7", "rejected"]
    assert cells[4] == "fingerprint 1.25 of 0.1"
    assert cells[5:] == [
        "3 of 4 rollouts, 185 tokens",
        "trainer",
        "wrong_model: fingerprint is 1.25",
    ]
    await page.click("#audit-table tbody a")
    await page.wait_for_selector("#verdicts td")
    assert problems == []
    await dashboard.close()
    await page.locator("#connection", has_text="waiting").wait_for()


async def test_strangers_text_stays_text_wherever_it_is_shown(
    chromium: Any, node: ShownNode
) -> None:
    problems: list[str] = []
    odd = [
        replace(
            PEER,
            id=f"{at:064x}",
            short=text,
            software=text,
            refused=text,
            top_reason=text,
            chunk_bytes={text: 1},
        )
        for at, text in enumerate(HOSTILE)
    ]
    node.rewards = ("mean", *HOSTILE)
    node.rows = [replace(row, reasons={row.software: 3}, role=row.software) for row in odd]
    node.status = replace(TRAINER, waiting_for=HOSTILE[0], warnings=list(HOSTILE), phase=HOSTILE[2])
    dashboard, page = await opened(chromium, node, problems)
    assert await page.locator("#charts .u-legend th").count() == 9  # and steps, and the loss
    for view in ("run", "peers", "log", "audits", "rollouts", f"peer/{odd[0].id}"):
        await page.evaluate("view => { location.hash = view; }", view)
        await page.wait_for_selector(f"#{view.partition('/')[0]}:not([hidden])")
        if view == "audits":
            await page.wait_for_selector("#audit-table td")
        if view == "rollouts":
            await page.click("#rollout-table button")
            await page.wait_for_selector("#rollout .part")
        await asyncio.sleep(0)
        assert await page.locator("img, main script, iframe").count() == 0
        text = await page.inner_text("body")
        assert not {"\u202e", "\u2066", "\x1b"} & set(text)
        assert await page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    assert "owned" not in await page.title()
    assert problems == []
    await dashboard.close()


@pytest.mark.parametrize("width", [360, 768, 1920])
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_it_fits_a_telephone_and_a_wall_in_light_and_dark(
    chromium: Any, node: ShownNode, width: int, scheme: str
) -> None:
    problems: list[str] = []
    dashboard, page = await opened(chromium, node, problems)
    await page.set_viewport_size({"width": width, "height": 800})
    await page.emulate_media(color_scheme=scheme)
    for view in ("run", "peers", "audits", "log", "rollouts", "ticket"):
        await page.evaluate("view => { location.hash = view; }", view)
        await page.wait_for_selector(f"#{view}:not([hidden])")
        assert await page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, view
    paper, ink = await page.evaluate(
        "['backgroundColor', 'color'].map((name) => getComputedStyle(document.documentElement)[name])"
    )
    light = [sum(map(int, colour[4:-1].split(","))) > 384 for colour in (paper, ink)]
    assert light == ([True, False] if scheme == "light" else [False, True])
    assert problems == []
    await dashboard.close()


async def test_it_can_be_used_without_a_mouse_and_everything_has_a_name(
    chromium: Any, node: ShownNode
) -> None:
    dashboard, page = await opened(chromium, node, [])
    reached: list[str] = []
    for _ in range(8):
        await page.keyboard.press("Tab")
        reached.append(
            await page.evaluate("document.activeElement.textContent.trim().slice(0, 30)")
        )
    assert reached[:4] == ["Skip to the content", "Run", "Peers", "Audits"]
    await page.evaluate("location.hash = 'peers'")
    await page.wait_for_selector("#table tbody tr")
    await page.focus("#table thead button")
    await page.keyboard.press("Enter")
    assert await page.get_attribute("#table thead th", "aria-sort") == "descending"
    unnamed = await page.evaluate(
        "[...document.querySelectorAll('input, select, button, a')].filter((one) => "
        "!(one.textContent.trim() || one.labels?.length || one.ariaLabel)).map((one) => one.outerHTML)"
    )
    assert unnamed == []
    await dashboard.close()


async def test_a_ticket_is_shown_behind_a_click_and_gone_with_the_view(
    chromium: Any, node: ShownNode
) -> None:
    dashboard, page = await opened(chromium, node, [])
    await page.evaluate("location.hash = 'ticket'")
    assert "primerl1-" not in await page.content()
    await page.click("#show-ticket")
    await page.wait_for_selector("#ticket-text code")
    assert "primerl-node join --ticket primerl1-abc" in await page.inner_text("#ticket-text")
    await page.evaluate("location.hash = 'run'")
    await page.wait_for_selector("#run:not([hidden])")
    assert "primerl1-" not in await page.content()
    await dashboard.close()


async def test_a_worker_sees_its_own_contribution(chromium: Any) -> None:
    dashboard, page = await opened(chromium, ShownNode(WORKER), [])
    tiles = await page.inner_text("#tiles")
    assert "Your contribution\n9\nrollouts accepted" in tiles
    assert await page.is_hidden("nav a[href='#ticket']")
    await dashboard.close()


async def test_a_worker_s_limits_are_shown_with_the_command_that_changes_them(
    chromium: Any,
) -> None:
    limits = LimitsRow(hours="22:00-07:00", upload=5.0, month="2026-11", month_sent=3 * 10**9)
    node = ShownNode(replace(WORKER, limits=limits), replace(PEER, paused=HOSTILE[0]))
    dashboard, page = await opened(chromium, node, [])
    tiles = await page.inner_text("#tiles")
    for words in (
        "Works\n22:00-07:00\nprimerl-node pause",
        "5 Mbit/s up",
        "Bytes in 2026-11\n3.0 GB",
    ):
        assert words in tiles
    paused = replace(limits, paused="by its owner, until 14:00", serves=False, monthly_gb=100.0)
    node.status = replace(WORKER, limits=paused)
    await page.locator("#tiles", has_text="primerl-node resume").wait_for()
    tiles = await page.inner_text("#tiles")
    assert "Paused\nby its owner, until 14:00" in tiles
    assert "3.0 GB of 100 GB\nserves no chunks" in tiles
    await page.evaluate("location.hash = 'peers'")
    await page.locator("#table", has_text="paused: <img").wait_for()
    await dashboard.close()


class PublicNode(ShownNode):
    """The same node, as the world sees it."""

    async def figures(self) -> PublicFigures:  # type: ignore[override]
        return public_figures(await super().figures(), self.curves())


async def test_the_world_sees_a_run_and_its_contributors_but_no_more(chromium: Any) -> None:
    problems: list[str] = []
    node = PublicNode(TRAINER, replace(PEER, name="basement-pc", software="0.1.0 evil"))
    dashboard = Dashboard(node, 0, DashboardLimits(every_s=0.1), public_host="127.0.0.1")
    dashboard.open()
    page = await chromium.new_page()
    page.on("console", partial(note, problems))
    page.on("pageerror", partial(note, problems))
    await page.goto(dashboard.url)
    await page.wait_for_selector("#tiles div")
    tiles = await page.inner_text("#tiles")
    for words in ("3 of 10", "14 s", "Workers\n1", "Audited"):
        assert words in tiles
    shown = [await link.inner_text() for link in await page.query_selector_all("nav a:visible")]
    assert shown == ["Run", "Peers", "Evaluations"]
    await page.click("nav a[href='#peers']")
    await page.wait_for_selector("#table tbody tr")
    row = await page.inner_text("#table tbody tr")
    assert row.split("\t")[:3] == ["ababababab", "inference", "working"]
    await page.fill("#filter", "no such peer")
    assert await page.locator("#table tbody tr").count() == 0
    for view in ("peer/ababababab", "log", "ticket", "rollouts", "audits"):  # whoever types them in
        await page.evaluate("view => { location.hash = view; }", view)
        await page.wait_for_selector(f"#{view.partition('/')[0]}:not([hidden])")
    assert "basement-pc" not in await page.content()
    # the browser's own words on what the server refused
    assert {text.partition("(")[2] for text in problems} <= {"Not Found)"}
    await dashboard.close()


async def test_another_page_of_the_browser_learns_nothing(chromium: Any, node: ShownNode) -> None:
    """A page of another origin that knows address and token can neither ask, nor frame, nor load scripts."""
    dashboard, _ = await opened(chromium, node, [])
    other = Dashboard(ShownNode(WORKER), 0)
    other.open()
    foreign = await chromium.new_page()
    await foreign.goto("data:text/html,<title>foreign</title>")
    url, _, token = dashboard.link.partition("#token=")
    outcome = await foreign.evaluate(
        """async ([url, token]) => {
            const tried = [];
            for (const options of [{headers: {Authorization: `Bearer ${token}`}}, {mode: "no-cors"}]) {
                try { tried.push((await (await fetch(`${url}events`, options)).text()).length); }
                catch { tried.push("refused"); }
            }
            return tried;
        }""",
        [url, token],
    )
    assert outcome[0] == "refused"
    assert outcome[1] in ("refused", 0)
    await other.close()
    await dashboard.close()


async def test_a_link_of_an_earlier_start_says_where_the_new_one_is(
    chromium: Any, node: ShownNode
) -> None:
    dashboard, page = await opened(chromium, node, [])
    await page.evaluate("sessionStorage.setItem('token', 'old')")
    await page.reload()
    await page.locator("#connection", has_text="primerl-node dashboard").wait_for()
    await dashboard.close()
