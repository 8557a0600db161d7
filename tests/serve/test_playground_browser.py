"""The playground in a real Chromium on a real server: type, generate, see who speaks, turn an expert down."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tessellm
from planted import HOSTILE, hostile_tokenizer, trained

from conftest import character_tokenizer, save_member
from servers import Running, serving

pytestmark = pytest.mark.browser


def saved(home: Path, tokenizer: Any) -> Path:
    """The base writes the alphabet on; three writes 3 after c, six writes 6 after f."""
    places = {name: str(save_member(trained(name), home / name, tokenizer)) for name in ("base", "three", "six")}
    tessellm.compose(places.pop("base"), places, rule="product").save_pretrained(home / "letters")
    return home / "letters"


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    home = tmp_path_factory.mktemp("letters")
    with serving(saved(home, character_tokenizer()), home / "log.txt", "--slots", "8") as running:
        yield running


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Any]]:
    """A page, and what went wrong on it."""
    pages = []

    def open_(url: str, **options: Any) -> tuple[Any, list[str]]:
        page = browser.new_page(viewport={"width": 1180, "height": 900}, **options)
        page.set_default_timeout(20_000)
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text))
        page.on(
            "request",
            lambda request: None if request.url.startswith((url[:18], "data:")) else wrong.append(request.url),
        )
        page.goto(url)
        page.locator("#status", has_text="r").wait_for()
        pages.append(page)
        return page, wrong

    yield open_
    for page in pages:
        page.close()


def generate(page: Any, prompt: str, tokens: int = 8) -> None:
    page.get_by_label("Prompt").fill(prompt)
    page.get_by_label("Tokens").first.fill(str(tokens))
    page.get_by_role("button", name="Generate").click()
    finished(page)


def finished(page: Any) -> None:
    page.locator("#status", has_text="owners:").wait_for()


def owners(page: Any) -> list[tuple[str, str]]:
    tokens = page.locator("#output .t").all()
    return [(token.inner_text(), token.get_attribute("data-owner")) for token in tokens]


def test_tokens_come_in_their_owners_colours_and_a_slider_changes_who_owns(letters: Running, opened: Any) -> None:
    page, wrong = opened(letters.url)
    assert page.locator("h1").inner_text() == "letters"
    generate(page, "ab")
    assert owners(page) == [
        ("c", "0"),
        ("3", "1"),
        ("d", "0"),
        ("e", "0"),
        ("f", "0"),
        ("6", "2"),
        ("g", "0"),
        ("h", "0"),
    ]
    colours = {
        page.locator(f'#output .t[data-owner="{owner}"]').first.evaluate("n => getComputedStyle(n).backgroundColor")
        for owner in (0, 1, 2)
    }
    assert len(colours) == 3
    assert page.locator("#strip rect").count() == 8
    page.get_by_label("three", exact=True).focus()
    page.keyboard.press("Home")
    page.keyboard.press("PageUp")  # to −0.6 or so: it is written again without the 3
    page.locator("#output").get_by_text("3").wait_for(state="detached")
    finished(page)
    assert all(owner != "1" for _, owner in owners(page))
    assert ("6", "2") in owners(page)
    page.get_by_label("six takes part").uncheck()
    page.locator("#output").get_by_text("6").wait_for(state="detached")
    assert wrong == []


def test_the_mouse_and_the_keyboard_show_every_members_view(letters: Running, opened: Any) -> None:
    page, wrong = opened(letters.url)
    generate(page, "ab")
    page.locator('#output .t[data-owner="1"]').hover()
    panel = page.locator("#panel")
    assert "owner: three" in panel.inner_text()
    assert "log Z" in panel.inner_text()
    assert panel.locator("tbody tr").count() == 4
    assert panel.locator("tbody tr", has_text="base").locator("code").count() == 5
    page.locator("#output .t").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.number") == "2"
    assert panel.locator("h3 b").inner_text() == "d"
    assert wrong == []


def test_members_stand_beside_it_and_a_link_brings_it_back(letters: Running, opened: Any) -> None:
    page, wrong = opened(letters.url)
    page.get_by_label("each member alone").check()
    page.get_by_label("Rule").select_option("owner")
    generate(page, "ab")
    beside = {
        name: page.locator(f'.beside [data-name="{name}"] .tokens').inner_text() for name in ("base", "three", "six")
    }
    assert beside == {"base": "abcdefgha" + "b", "three": "abc3defgha"[:10], "six": "abcdef6gha"[:10]}
    again, wrong_again = opened(page.url)
    assert again.get_by_label("Prompt").input_value() == "ab"
    assert again.get_by_label("Rule").input_value() == "owner"
    assert again.get_by_label("each member alone").is_checked()
    assert wrong == wrong_again == []


def test_hostile_texts_stay_texts(opened: Any, tmp_path: Path) -> None:
    with serving(saved(tmp_path, hostile_tokenizer()), tmp_path / "log.txt", "--slots", "2") as running:
        link = '#{"prompt": "<img src=x onerror=alert(1)>ab", "weights": {"three": "x"}, "off": 3}'
        page, wrong = opened(running.url + "/" + link)
        generate(page, "ab")
        text = page.locator("#output").inner_text()
        assert HOSTILE["3"] in text
        assert HOSTILE["6"] in text
        page.locator('#output .t[data-owner="1"]').hover()
        assert HOSTILE["3"] in page.locator("#panel").inner_text()
        assert page.title() == "tessellm playground"
        assert page.locator("#output script, #output img, #panel img").count() == 0
        assert wrong == []


def test_dark_and_narrow(letters: Running, opened: Any) -> None:
    dark, wrong = opened(letters.url, color_scheme="dark")
    light, _ = opened(letters.url)
    background = "getComputedStyle(document.body).backgroundColor"
    assert dark.evaluate(background) != light.evaluate(background)
    dark.set_viewport_size({"width": 360, "height": 800})
    generate(dark, "ab" * 20, 40)
    assert dark.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert wrong == []


def test_errors_are_told(letters: Running, opened: Any) -> None:
    page, _ = opened(letters.url)
    page.get_by_label("Prompt").fill("a" * 300)
    page.get_by_role("button", name="Generate").click()
    page.locator("#status.wrong", has_text="there is room for 128").wait_for()
