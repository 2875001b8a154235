"""The report in a real browser: curves, controls by mouse and keyboard, nothing loaded, hostile names inert."""

from __future__ import annotations

import base64
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from gradalign.report import write_report
from run_folders import PAPER, spec_of, write_comparison, write_run
from test_report import evil_folder

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed; pip install 'gradalign[dev]'")
CHROMIUM = next((path for name in ("chromium", "chromium-browser") if (path := shutil.which(name))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver (Debian: chromium, chromium-driver)"
)
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1200,900"),
    "--force-prefers-reduced-motion",  # the page scrolls at once, so that a click finds what it aims at
)


@pytest.fixture(scope="module")
def browser():
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = Options()
        options.binary_location = CHROMIUM
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(DRIVER, log_output=os.devnull))
        driver.set_page_load_timeout(120)
        driver.set_script_timeout(120)
        yield driver
        driver.quit()


def show(browser, page: Path) -> None:
    browser.get("about:blank")  # the browser's own first page asks for this and that
    browser.get_log("browser")
    browser.get_log("performance")
    browser.get(page.as_uri())
    assert browser.execute_script("return document.documentElement.dataset.ready") == "true"


def nothing_went_wrong(browser) -> None:
    """No word on the console, and no request but for the page itself and what it carries."""
    assert browser.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
    assert asked
    assert all(url.startswith(("file:", "data:", "blob:")) for url in asked), asked


def traces(browser, figure: str, meta: str = "mean") -> list[dict]:
    """Return what plotly has drawn: the traces of one kind, as the browser holds them."""
    script = """
      const plot = document.querySelector(`.figure[data-figure=${arguments[0]}] .plot`);
      const found = plot.data.filter((trace) => trace.meta === arguments[1]);
      return found.map((trace) => ({x: [...trace.x], y: [...trace.y], name: trace.name, color: trace.line.color}));
    """
    return browser.execute_script(script, figure, meta)


def drawn(browser, figure: str) -> int:
    """Return how many lines are really on the page, as SVG paths with a length."""
    script = """
      const lines = [...document.querySelectorAll(`[data-figure=${arguments[0]}] .scatterlayer .trace path.js-line`)];
      const seen = (line) => line.getTotalLength() > 10 && getComputedStyle(line).strokeWidth !== "0px";
      return lines.filter(seen).length;
    """
    return browser.execute_script(script, figure)


def title(browser, figure: str, axis: str) -> str:
    script = "return document.querySelector(`[data-figure=${arguments[0]}] .${arguments[1]}title`).textContent"
    return browser.execute_script(script, figure, axis)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    results = {"fedga": [0.80, 0.82, 0.84], "fedavg": [0.70, 0.71, 0.72]}
    write_comparison(folder / "c", results, paper=PAPER)
    held = json.dumps({"names": ["a", "b"], "counts": [[20, 0], [0, 20], [10, 10]], "clients": 3})
    (folder / "c/fedga/seed0/holdings.json").write_text(held)
    return write_report([folder / "c"], folder / "report.html")


def choose(browser, field: str, value: str) -> None:
    browser.find_element("css selector", f"input[data-state={field}][value={value}] + label").click()


def test_curves_are_there_with_the_right_numbers(browser, page):
    show(browser, page)
    fedga, fedavg = traces(browser, "choice")
    assert [fedga["name"], fedavg["name"]] == ["fedga", "fedavg"]
    assert fedga["x"] == [0, 2, 4, 6, 8]
    assert fedga["y"] == pytest.approx([0, 0.205, 0.41, 0.615, 0.82])
    assert fedavg["x"] == [0, 1, 2, 3, 4]
    assert len(traces(browser, "choice", "band")) == 2
    assert drawn(browser, "choice") == 2
    assert traces(browser, "drift")[0]["y"] == [3, 2, 1]
    assert drawn(browser, "r") == 2
    assert not browser.find_elements("css selector", "[data-figure=beta]"), "β stays what it is"
    assert browser.find_elements("css selector", ".classes .heatmaplayer image")
    buttons = browser.execute_script(
        "return [...document.querySelectorAll('.modebar-btn')].map((b) => b.dataset.title)"
    )
    assert set(buttons) == {"Download plot as a PNG", "Zoom in", "Zoom out", "Reset axes"}, "none sends data away"
    nothing_went_wrong(browser)


def test_axes_and_curves_switch(browser, page):
    show(browser, page)
    assert (title(browser, "choice", "x"), title(browser, "choice", "y")) == ("communication rounds", "test accuracy")
    for axis, xs, words in (
        ("local_updates", [0, 100, 200, 300, 400], "local updates"),
        ("examples", [0, 120, 240, 360, 480], "computation"),
        ("bytes", [0, 20, 40, 60, 80], "bytes sent"),
        ("seconds", [0, 0.5, 1, 1.5, 2], "seconds"),
    ):
        choose(browser, "axis", axis)
        assert traces(browser, "choice")[0]["x"] == xs
        assert words in title(browser, "choice", "x")
        assert words in title(browser, "drift", "x"), "all curves follow"
    choose(browser, "quantity", "test_loss")
    assert traces(browser, "choice")[1]["y"] == pytest.approx([2, 1, 0.666667, 0.5, 0.4])
    assert title(browser, "choice", "y") == "test loss"
    choose(browser, "quantity", "train_accuracy")
    assert traces(browser, "choice")[0]["y"] == pytest.approx([0.05, 0.46, 0.87])
    plot = browser.find_element("css selector", "[data-figure=choice] .plot")
    assert "training accuracy" in plot.get_attribute("aria-label")
    nothing_went_wrong(browser)


def test_single_seeds_and_legend(browser, page):
    show(browser, page)
    browser.find_element("css selector", "button[data-mode=seeds]").click()
    (fedga, _) = traces(browser, "choice", "seeds")
    assert [value for value in fedga["y"] if value is not None][4::5] == pytest.approx([0.80, 0.82, 0.84])
    browser.find_element("css selector", "button[data-group='0']").click()
    assert [trace["name"] for trace in traces(browser, "choice")] == ["fedavg"]
    assert [trace["name"] for trace in traces(browser, "r")] == ["fedavg"]
    browser.find_element("css selector", "button[data-show=none]").click()
    assert traces(browser, "choice") == []
    browser.find_element("css selector", "button[data-show=all]").click()
    assert len(traces(browser, "choice")) == 2
    nothing_went_wrong(browser)


def test_a_tooltip_has_round_mean_and_spread_of_every_curve(browser, page):
    show(browser, page)
    # At 4 communication rounds: fedga after its round 2 of 4, fedavg at its end.
    hover = "Plotly.Fx.hover(document.querySelector('[data-figure=choice] .plot'), {xval: 4})"
    browser.execute_script(hover)
    words = browser.execute_script("return document.querySelector('[data-figure=choice] .hoverlayer').textContent")
    assert "4 communication rounds" in words
    assert "fedga : 41.00%, 40.00% to 42.00%, round 2" in words
    assert "fedavg : 71.00%, 70.00% to 72.00%, round 4" in words


def test_the_accuracy_axis_shows_the_differences_and_all_of_it_when_asked(browser, page):
    show(browser, page)
    span = "return document.querySelector('[data-figure=choice] .plot')._fullLayout.yaxis.range"
    # After a quarter of the rounds: fedavg's lowest seed has 70 / 4 = 17.5 %, fedga's highest ends at 84 %; 5 % beyond.
    beyond = 0.05 * (0.84 - 0.175)
    assert browser.execute_script(span) == pytest.approx([0.175 - beyond, 0.84 + beyond])
    browser.find_element("css selector", "button[data-group='0']").click()
    assert browser.execute_script(span)[1] == pytest.approx(0.72 + 0.05 * (0.72 - 0.175)), "of what is shown"
    browser.find_element("css selector", "button[data-mode=whole]").click()
    assert browser.execute_script(span) == [0, 1]
    choose(browser, "quantity", "test_loss")
    assert browser.execute_script(span) != [0, 1]
    nothing_went_wrong(browser)


def press(browser, *keys: str) -> None:
    from selenium.webdriver import ActionChains

    ActionChains(browser).send_keys(*keys).perform()


def focused(browser, script: str):
    return browser.execute_script(f"const e = document.activeElement; return {script}")


def tab_to(browser, script: str) -> None:
    from selenium.webdriver.common.keys import Keys

    for _ in range(60):
        press(browser, Keys.TAB)
        if focused(browser, script):
            return
    pytest.fail(f"the keyboard does not lead to {script}")


def test_everything_works_by_keyboard(browser, page):
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import WebDriverWait

    show(browser, page)
    press(browser, Keys.TAB)
    assert focused(browser, "e.className") == "skip"
    assert focused(browser, "e.getBoundingClientRect().left") >= 0, "the skip link shows itself"
    press(browser, Keys.TAB, Keys.ENTER)
    assert browser.execute_script("return document.documentElement.dataset.theme") == "dark"
    tab_to(browser, "e.dataset.state === 'quantity'")
    press(browser, Keys.ARROW_RIGHT)
    assert title(browser, "choice", "y") == "test loss"
    outline = "getComputedStyle(document.querySelector(`label[for='${e.id}']`)).outlineStyle"
    assert focused(browser, outline) == "solid", "the focus can be seen"
    tab_to(browser, "e.dataset.state === 'axis'")
    press(browser, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert traces(browser, "choice")[0]["x"] == [0, 20, 40, 60, 80]
    tab_to(browser, "e.dataset.mode === 'seeds'")
    press(browser, Keys.SPACE)
    assert traces(browser, "choice", "seeds")
    tab_to(browser, "e.dataset.group === '1'")
    press(browser, Keys.ENTER)
    assert len(traces(browser, "choice")) == 1
    tab_to(browser, "e.tagName === 'SUMMARY'")
    press(browser, Keys.ENTER)
    # The browser tells the page of an opened element a moment later.
    table = "[data-figure=choice] details table tbody tr"
    rows = WebDriverWait(browser, 60).until(lambda shown: shown.find_elements("css selector", table))
    assert [row.text.split() for row in rows][1] == ["fedga", "1", "20", "1", "1", "1"]
    nothing_went_wrong(browser)


def test_light_and_dark(browser, page):
    wish = {"name": "prefers-color-scheme", "value": "dark"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [wish]})
    try:
        show(browser, page)
        ground = "return getComputedStyle(document.body).backgroundColor"
        dark, colour = browser.execute_script(ground), traces(browser, "choice")[0]["color"]
        assert sum(map(int, dark.removeprefix("rgb(").removesuffix(")").split(","))) < 150
        browser.find_element("css selector", ".theme").click()
        assert browser.execute_script(ground) == "rgb(255, 255, 255)"
        assert traces(browser, "choice")[0]["color"] != colour, "figures follow"
        nothing_went_wrong(browser)
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_printing_is_light_and_whole(browser, page):
    show(browser, page)
    browser.find_element("css selector", ".theme").click()
    measure = "return [...document.querySelectorAll('.plot .main-svg')].map((svg) => svg.getBoundingClientRect().width)"
    before = browser.execute_script(measure)
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert browser.execute_script("return document.documentElement.dataset.theme") == "light"
    assert max(browser.execute_script(measure)) <= 700, "as wide as a sheet of paper"
    browser.execute_script("dispatchEvent(new Event('afterprint'))")
    assert browser.execute_script("return document.documentElement.dataset.theme") == "dark"
    assert browser.execute_script(measure) == before
    pdf = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", {})["data"])
    assert pdf.startswith(b"%PDF")
    nothing_went_wrong(browser)


def test_a_narrow_screen_scrolls_only_down(browser, page):
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    )
    try:
        show(browser, page)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
        captions = "return [...document.querySelectorAll('caption')].map((one) => one.getBoundingClientRect().right)"
        assert max(browser.execute_script(captions)) <= 390, "a caption is read without scrolling"
        inside = """
          const clipped = [];
          for (const plot of document.querySelectorAll(".figure[data-figure] .plot")) {
            const frame = plot.getBoundingClientRect();
            for (const text of plot.querySelectorAll(".xtitle, .ytitle, .xtick text, .ytick text")) {
              const own = text.getBoundingClientRect();
              const out = own.left < frame.left || own.right > frame.right || own.bottom > frame.bottom;
              if (out || own.top < frame.top) clipped.push(text.textContent);
            }
          }
          return clipped;
        """
        assert browser.execute_script(inside) == [], "no label is cut off"
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_hostile_names_are_inert(browser, tmp_path):
    from selenium.common.exceptions import NoAlertPresentException
    from selenium.webdriver import ActionChains

    show(browser, write_report([evil_folder(tmp_path)], tmp_path / "r.html"))
    browser.find_element("css selector", "button[data-mode=seeds]").click()
    browser.find_element("css selector", ".figure summary").click()
    # Hovering shows the name inside the figure, where plotly would read tags.
    plot = browser.find_element("css selector", "[data-figure=choice] .nsewdrag")
    point = "document.querySelector('[data-figure=choice] .plot'), [{curveNumber: 0, pointNumber: 2}]"
    browser.execute_script(f"Plotly.Fx.hover({point})")
    hover = browser.execute_script("return document.querySelector('[data-figure=choice] .hoverlayer').textContent")
    assert "<img src=x onerror=alert(1)>" in hover
    ActionChains(browser).move_to_element(plot).click().perform()
    for element in ("img", "svg[onload]", ".plot a", "[onerror]", ".hoverlayer [style*='bold']"):
        assert browser.find_elements("css selector", element) == [], element
    heading = browser.find_element("css selector", "h1").text
    assert heading.startswith("<svg onload=alert(2)></script><img")
    with pytest.raises(NoAlertPresentException):
        _ = browser.switch_to.alert
    nothing_went_wrong(browser)


def test_fifty_runs_stay_readable(browser, tmp_path):
    for place in range(50):
        beta = round(0.01 * (place + 1), 2)
        settings = spec_of() | {"algorithm": {"name": "fedga", "beta": beta}}
        write_run(tmp_path / f"runs/{place}", settings, final=beta, rounds=1000)
    page = write_report([tmp_path / "runs"], tmp_path / "r.html")
    assert page.stat().st_size < 12e6
    show(browser, page)
    assert browser.execute_script("return document.querySelector('.comparison tbody').rows.length") == 50
    best = [f"fedga (β={0.01 * place:.2g})" for place in range(43, 51)]
    assert [trace["name"] for trace in traces(browser, "choice")] == best, "the eight that ended highest"
    assert all(len(trace["x"]) <= 400 for trace in traces(browser, "choice"))
    assert "8 of 50" in browser.find_element("css selector", ".shown-count").text
    browser.find_element("css selector", "button[data-show=all]").click()
    assert drawn(browser, "choice") == 50
    nothing_went_wrong(browser)
