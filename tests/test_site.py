"""The built pages in a browser: `make book` writes them to _build/html, and a sampler book that holds one of each thing is built here.

Without a browser or without a site these tests are skipped with the reason; where CI is set to true they fail instead.
"""

import functools
import http.server
import json
import os
import shutil
import threading
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

import pytest
import yaml
from axe_playwright_python.sync_playwright import Axe
from bs4 import BeautifulSoup
from playwright.sync_api import sync_playwright
from sampler import ROOT, sampler

from rope_heads import contents, pages, runner

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip
SITES = ("sampler", "book")
VIEWS = [(scheme, width) for scheme in ("light", "dark") for width in (1280, 390)]


def missing(reason):
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def sites(tmp_path_factory):
    """Folder of each site; the sampler is built on first use."""

    @functools.cache
    def folder(name):
        if name == "book":
            return the_book()
        root = tmp_path_factory.mktemp("sampler")
        sampler(root)
        assert pages.build(root) == 0
        return root / "_build" / "html"

    return folder


def the_book():
    html = ROOT / "_build" / "html"
    if not (html / "report.json").is_file():
        missing("the site is not built: run `make book` first")
    report = json.loads((html / "report.json").read_text())
    keys = {record["chapter"]: record["key"] for record in report["chapters"]}
    wanted = {path.stem: runner.cache_key(ROOT, path, runner.parameters_of(report["mode"])) for path in contents.chapters(ROOT)}
    changed = sorted(name for name in wanted if keys.get(name) != wanted[name])
    if changed:
        missing(f"_build/html is older than {', '.join(changed)}: run `make book` first")
    return html


@pytest.fixture(params=SITES)
def site(request, sites):
    return sites(request.param)


def html_files(site):
    """Every page of the site, without the redirect at its top."""
    names = [path.relative_to(site).as_posix() for path in sorted(site.rglob("*.html"))]
    return [name for name in names if name != "index.html" and not name.startswith(("_static/", "_sources/"))]


@functools.cache
def parsed(path):
    return BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")


# ---- what can be seen without a browser ----


def test_all_pages_are_there(site):
    names = html_files(site)
    assert {"book/glossary.html", "book/bibliography.html", "book/status.html", "search.html"} <= set(names)
    assert parsed(site / "index.html").find("meta", attrs={"http-equiv": "Refresh"})["content"].endswith(".html")


def test_every_internal_link_resolves(site):
    broken, seen = [], 0
    for name in ["index.html", *html_files(site)]:
        page = parsed(site / name)
        links = [tag[key] for tag in page.find_all(True) for key in ("href", "src") if tag.get(key)]
        for link in links + [tag["content"].split("url=")[1] for tag in page.find_all("meta", attrs={"http-equiv": "Refresh"})]:
            address, fragment = urldefrag(urljoin(f"http://site/{name}", link))
            parts = urlsplit(address)
            if parts.netloc != "site":
                continue
            seen += 1
            target = site / unquote(parts.path).lstrip("/")
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file() or fragment and target.suffix == ".html" and not anchor(target, unquote(fragment)):
                broken.append(f"{name}: {link}")
    assert not broken and seen > 100


def anchor(page, name):
    return bool(parsed(page).find(id=name) or parsed(page).find("a", attrs={"name": name}))


def test_every_figure_has_alt_text(site):
    images = [(name, image) for name in html_files(site) for image in parsed(site / name).select("article img")]
    wrong = [f"{name}: {image['src']} has alt {image.get('alt')!r}" for name, image in images if not spoken(image)]
    assert not wrong
    assert images, "no page shows a figure"


def spoken(image):
    """A sentence, where the default would be the image's file name."""
    alt = image.get("alt", "").strip()
    return len(alt) >= 10 and Path(image["src"]).stem not in alt


def test_pages_show_no_error_no_warning_and_no_path_of_this_machine(site):
    for name in html_files(site):
        page = parsed(site / name)
        assert not page.select(".output.stderr, .output.traceback"), f"{name} shows what a cell wrote to stderr"
        for path in (str(ROOT), str(site.parents[1])):
            assert path not in (site / name).read_text(encoding="utf-8"), f"{name} names {path}"


def test_executed_chapters_say_what_they_took(site):
    report = json.loads((site / "report.json").read_text())
    assert report["ok"] and report["chapters"]
    for record in report["chapters"]:
        text = parsed(site / "book" / f"{record['chapter']}.html").select_one(".measured").text
        assert f"{record['peak_memory_mb']} MB" in text and record["executed"][:10] in text


def test_every_chapter_opens_in_colab_from_the_tag_that_its_first_cell_installs(site):
    repository = yaml.safe_load((ROOT / "_config.yml").read_text())["repository"]
    place = repository["url"].removeprefix("https://github.com/") + f"/blob/{repository['branch']}"
    for record in json.loads((site / "report.json").read_text())["chapters"]:
        name = f"book/{record['chapter']}"
        links = [tag["href"] for tag in parsed(site / f"{name}.html").select('a[href*="colab"]')]
        assert links == [f"https://colab.research.google.com/github/{place}/{name}.ipynb"]


def test_solutions_are_folded(site):
    pages_with = 0
    for name in html_files(site):
        for solution in parsed(site / name).select("div.solution"):
            pages_with += 1
            assert "dropdown" in solution["class"], f"{name}: {solution.text[:60]} is not folded"
        for cell in parsed(site / name).select("div.cell.tag_solution"):
            assert any(tag.startswith("tag_hide-") for tag in cell["class"]), f"{name} shows a solution's code"
    assert pages_with or site.parents[1] == ROOT


# ---- what only a browser sees ----


@pytest.fixture(scope="session")
def browser():
    named = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    with sync_playwright() as playwright:
        executable = named or playwright.chromium.executable_path
        if not Path(executable).exists():
            missing("no Chromium here: `apt-get install chromium` on Debian and Ubuntu, `.venv/bin/playwright install chromium` elsewhere")
        launched = playwright.chromium.launch(executable_path=executable, args=FLAGS)
        yield launched
        launched.close()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@pytest.fixture
def served(site):
    """Address of the site on this machine's loopback."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


class Visit:
    """A browser page that notes what goes wrong: requests elsewhere, failed requests, console errors, uncaught exceptions."""

    def __init__(self, context, base):
        self.base, self.complaints, self.page = base, [], context.new_page()
        self.page.set_default_timeout(180_000)  # of a busy machine
        self.page.route("**/*", self.decide)
        self.page.on("console", lambda message: message.type == "error" and self.complaints.append(f"console: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(f"exception: {error}"))
        self.page.on("response", lambda reply: reply.status >= 400 and self.complaints.append(f"{reply.status}: {reply.url}"))

    def decide(self, route):
        if route.request.url.startswith((self.base, "data:", "blob:")):
            route.continue_()
        else:
            self.complaints.append(f"request to another host: {route.request.url}")
            route.abort()

    def open(self, name):
        self.page.goto(self.base + name, wait_until="load")
        self.page.wait_for_load_state("networkidle")
        self.page.evaluate("() => window.MathJax?.startup?.promise")


@pytest.mark.parametrize("scheme, width", VIEWS, ids=[f"{scheme}-{width}" for scheme, width in VIEWS])
def test_pages_in_the_browser(browser, site, served, scheme, width):
    """No request to another host, no console error, no serious accessibility fault, all maths typeset, nothing wider than the screen."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce")
    problems = []
    names = html_files(site)
    if "book/everything.html" in names:  # the sampler's other pages are like the book's
        names = ["book/everything.html", "book/bibliography.html"]
    for name in names:
        visit = Visit(context, served)
        visit.open(name)
        assert visit.page.evaluate("document.documentElement.dataset.theme") == scheme
        problems += [f"{name}: {complaint}" for complaint in visit.complaints]  # before axe, which fetches style sheets by itself
        if visit.page.evaluate("document.documentElement.scrollWidth > window.innerWidth"):
            problems.append(f"{name}: wider than the screen")
        problems += [f"{name}: maths not typeset: {text}" for text in untypeset(visit.page)]
        problems += [f"{name}: formula sticks out of its line: {text}" for text in formulas_cut(visit.page)]
        problems += [f"{name}: {fault}" for fault in figure_faults(visit.page)]
        problems += [f"{name}: {fault}" for fault in accessibility(visit.page)]
        visit.page.close()
    context.close()
    assert not problems, "\n".join(problems)


def untypeset(page):
    return page.evaluate("""() => [...document.querySelectorAll("article .math, mjx-merror")]
        .filter(node => node.localName == "mjx-merror" || !node.querySelector("mjx-container")).map(node => node.textContent.slice(0, 80))""")


def formulas_cut(page):
    """Inline formulas that reach beyond their paragraph, in which a narrow screen cuts them; displayed ones scroll."""
    return page.evaluate("""() => [...document.querySelectorAll("article span.math mjx-container")]
        .filter(node => node.getBoundingClientRect().right > node.closest("p, li, dd, td, h1, h2, h3").getBoundingClientRect().right + 1)
        .map(node => node.textContent.slice(0, 80))""")


def figure_faults(page):
    """Figures whose print is too small to read, or that scroll without being reached by keyboard under a name of their own."""
    frames = page.evaluate("""() => [...document.querySelectorAll("article .figure-frame")].map(frame => ({
        src: frame.firstChild.src, shown: frame.firstChild.clientWidth / frame.firstChild.naturalWidth,
        scrolls: frame.scrollWidth > frame.clientWidth + 1, focus: frame.tabIndex, name: frame.getAttribute("aria-label")}))""")
    small = [f"print of {frame['src']} shrinks to {frame['shown']:.2f} of its size" for frame in frames if frame["shown"] < 0.6]
    silent = [f"{frame['src']} scrolls but has no name or no focus" for frame in frames if frame["scrolls"] != (frame["focus"] == 0 and bool(frame["name"]))]
    names = [frame["name"] for frame in frames if frame["scrolls"]]
    return small + silent + [f"two figures are called {name}" for name in set(names) if names.count(name) > 1]


def accessibility(page):
    violations = Axe().run(page).response["violations"]
    return [f"{fault['impact']} {fault['id']} in {node['html'][:120]}" for fault in violations if fault["impact"] in ("critical", "serious")
            for node in fault["nodes"]]  # fmt: skip


@pytest.mark.parametrize("site", ["sampler"], indirect=True)
def test_the_browser_test_sees_faults(browser, site, served):
    """Against itself: a page with one fault of each kind is reported for each."""
    faults = ('<img src="https://example.org/x.png"><script>console.error("faulty")</script><script>undefinedFunction()</script>'
              '<span class="math">\\(\\frac{\\)</span><p style="color:#aaa;background:#fff">pale</p><div style="width:3000px">wide</div>'
              '<script src="nowhere.js"></script><p style="width:40px"><span class="math">\\(a + b + c + d + e + f\\)</span></p>'
              '<span class="figure-frame"><img src="../_static/front.png" style="min-width:9px;width:99px"></span>')  # fmt: skip
    (site / "book/faulty.html").write_text((site / "book/title.html").read_text().replace("</article>", faults + "</article>"))
    try:
        context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
        visit = Visit(context, served)
        visit.open("book/faulty.html")
        complaints = " ".join(visit.complaints)
        for words in ("another host: https://example.org/x.png", "console: faulty", "exception: undefinedFunction", "404:"):
            assert words in complaints
        assert visit.page.evaluate("document.documentElement.scrollWidth > window.innerWidth")
        assert formulas_cut(visit.page) == ["a+b+c+d+e+f"] and "print of" in figure_faults(visit.page)[0]
        assert untypeset(visit.page) and "color-contrast" in " ".join(accessibility(visit.page))
        context.close()
    finally:
        (site / "book/faulty.html").unlink()


def test_search_finds_a_word_without_network(browser, site, served):
    context = browser.new_context()
    visit = Visit(context, served)
    visit.open("search.html?q=symbolic")
    visit.page.wait_for_selector("#search-results li a")
    assert not visit.complaints
    context.close()


@pytest.mark.parametrize("site", ["sampler"], indirect=True)
def test_folded_solution_opens_by_keyboard(browser, site, served):
    context = browser.new_context(reduced_motion="reduce")
    visit = Visit(context, served)
    visit.open("book/everything.html")
    body = visit.page.locator("div.solution .sphinx-bs, div.solution p", has_text="It is two").first
    assert not body.is_visible()
    button = visit.page.locator("div.solution button.toggle-button")
    button.focus()
    visit.page.keyboard.press("Enter")
    body.wait_for(state="visible")
    context.close()
