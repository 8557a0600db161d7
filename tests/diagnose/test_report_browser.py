"""The report in a real Chromium: it renders, answers mouse and keys, prints, and runs its own script alone."""

import pytest

import tessellm

from planted import HOSTILE, composition, hostile_tokenizer, prompts

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    model = composition("three", "other_three", "six")
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(tessellm.diagnose(model, prompts(), max_new_tokens=24).to_html(), encoding="utf-8")
    return path


@pytest.fixture
def opened(browser, report):
    """A page, and what went wrong on it."""
    pages = []

    def open_(path=report, **options):
        page = browser.new_page(viewport={"width": 1180, "height": 900}, **options)
        page.set_default_timeout(10_000)
        wrong = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text))
        page.on("request", lambda request: wrong.append(request.url) if not request.url.startswith("file:") else None)
        page.goto(path.as_uri())
        pages.append(page)
        return page, wrong

    yield open_
    for page in pages:
        page.close()


def test_it_renders_figures_first_and_tokens_in_their_owners_colours(opened):
    page, wrong = opened()
    assert page.title() == "Diagnosis of a composition"
    assert page.locator("h1").inner_text() == "These experts do not simply compose"
    boxes = [figure.bounding_box() for figure in page.locator("svg").all()]
    assert len(boxes) == 4
    assert all(box["width"] > 200 and box["height"] > 30 for box in boxes)
    assert max(box["y"] for box in boxes) < page.locator(".text").first.bounding_box()["y"]
    owned = page.locator('.t[data-i][data-o="3"]').first
    colours = {
        page.locator(f'.t[data-i][data-o="{owner}"]').first.evaluate("n => getComputedStyle(n).backgroundColor")
        for owner in (0, 1, 3)
    }
    assert len(colours) == 3
    assert owned.inner_text() == "6"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert wrong == []


def test_the_mouse_and_the_keyboard_show_every_members_view(opened):
    page, wrong = opened()
    page.locator('.t[data-i][data-o="3"]').first.hover()
    rows = page.locator("#panel tr")
    assert rows.count() == 1 + 5
    assert "owner: six" in page.locator("#panel h3").inner_text()
    assert page.locator("#panel tr", has_text="six").locator("code").count() == 5
    first = page.locator(".t[data-i]").first
    first.focus()
    before = page.locator("#panel h3 b").first.inner_text()
    assert before == first.inner_text()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.i") == "1"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.dataset.i") == "24"  # the next text
    assert wrong == []


def test_dark_narrow_and_printed(opened):
    light, _ = opened()
    dark, wrong = opened(color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    assert light.evaluate(background) == "rgb(255, 255, 255)"
    assert dark.evaluate(background) == "rgb(13, 17, 23)"
    dark.emulate_media(media="print")
    assert dark.evaluate(background) == "rgb(255, 255, 255)"
    assert not dark.locator("#panel").is_visible()
    light.set_viewport_size({"width": 390, "height": 800})
    assert light.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert light.pdf().startswith(b"%PDF")
    assert wrong == []


def test_hostile_tokens_are_shown_and_do_nothing(opened, tmp_path):
    model = composition("three", "other_three", "six")
    model.tokenizer = hostile_tokenizer()
    path = tmp_path / "hostile.html"
    path.write_text(tessellm.diagnose(model, prompts(), max_new_tokens=24).to_html(), encoding="utf-8")
    page, wrong = opened(path)
    for token in page.locator('.t[data-i][data-o="1"], .t[data-i][data-o="3"]').all()[:8]:
        token.hover()
    assert page.title() == "Diagnosis of a composition"
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 2
    assert HOSTILE["3"] in page.locator("body").inner_text()
    assert wrong == []


def test_the_page_forbids_scripts_that_are_not_its_own(opened, report, tmp_path):
    path = tmp_path / "changed.html"
    text = report.read_text(encoding="utf-8").replace("<main>", "<main><script>document.title='owned'</script>")
    path.write_text(text, encoding="utf-8")
    page, wrong = opened(path)
    assert page.title() == "Diagnosis of a composition"
    assert any("Content Security Policy" in each for each in wrong)
