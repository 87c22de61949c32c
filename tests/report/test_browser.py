"""The page in a browser: two widths, two color schemes, no network."""

from itertools import product

import pytest
from matplotlib import image

from tests.helpers.cases import some
from tests.report.browser import CHROMIUM, browser

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
WIDTHS, SCHEMES = (1366, 390), ("light", "dark")


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.mark.parametrize(("shown", "scheme", "width"), some(product(["report", "compared"], SCHEMES, WIDTHS)))
def test_it_looks_right(tab, request, shown, tmp_path, width, scheme):
    page = request.getfixturevalue(shown) / "index.html"
    tab.open(page, width, scheme)
    assert tab.requests() == [page.as_uri()]
    assert tab.complaints() == []
    assert tab.evaluate("document.documentElement.scrollWidth") == tab.evaluate("innerWidth") == width
    # whatever is wider than the page scrolls in a place of its own
    outside = "[...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1"
    assert tab.evaluate(f"{outside} && !e.closest('.scroll')).map(e => e.outerHTML.slice(0, 80))") == []

    tab.screenshot(tmp_path / "page.png")
    shot = image.imread(tmp_path / "page.png")[..., :3]
    assert shot.shape[1] == width
    paper = shot[2, 2].mean()
    assert paper > 0.9 if scheme == "light" else paper < 0.2
    # every screenful has something on it
    for top in range(0, len(shot) - 844, 844):
        assert shot[top : top + 844].std() > 0.02, top


def test_letters_of_pictures_can_be_read_on_a_phone(tab, report):
    tab.open(report / "index.html", 390, "light")
    sizes = tab.evaluate("[...document.querySelectorAll('svg text')].map(e => e.getBoundingClientRect().height)")
    assert len(sizes) > 100
    assert min(sizes) >= 8


def test_what_cannot_be_seen_at_once_can_be_reached_by_keyboard(tab, report):
    tab.open(report / "index.html", 390, "light")
    assert tab.evaluate("[...document.querySelectorAll('.scroll')].every(e => e.tabIndex === 0 && e.ariaLabel)")
    assert tab.evaluate("document.querySelectorAll('.scroll').length") > 5


def test_the_browser_does_see_requests_errors_and_overflow(tab, tmp_path):
    page = tmp_path / "bad.html"
    page.write_text('<div style="width: 900px">x</div><img src="http://127.0.0.1:9/x.png"><script>nothing()</script>')
    tab.open(page, 390, "light")
    assert "http://127.0.0.1:9/x.png" in tab.requests()
    assert tab.complaints()
    assert tab.evaluate("document.documentElement.scrollWidth") > 390
