"""The playground in a real Chromium on a real server: type, generate, see who speaks, turn an expert down."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tessellm

from conftest import character_tokenizer, save_member
from planted import HOSTILE, hostile_tokenizer, trained
from servers import PATIENCE, Running, serving

pytestmark = pytest.mark.browser
COMPLAINTS = ("error", "warning", "assert")  # of a console; hints of the browser and words of axe are none


def saved(home: Path, tokenizer: Any) -> Path:
    """The base writes the alphabet on; three writes 3 after c, six writes 6 after f."""
    places = {name: str(save_member(trained(name), home / name, tokenizer)) for name in ("base", "three", "six")}
    tessellm.compose(places.pop("base"), places, rule="product", router=False).save_pretrained(home / "letters")
    return home / "letters"


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    home = tmp_path_factory.mktemp("letters")
    with serving(saved(home, character_tokenizer()), home / "log.txt", "--slots", "8", "--rule", "mixture") as running:
        yield running


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Its members write markup; it asks for a key."""
    home = tmp_path_factory.mktemp("hostile")
    folder = saved(home, hostile_tokenizer())
    with serving(folder, home / "log.txt", "--slots", "2", env={"TESSELLM_API_KEY": "sesame"}) as running:
        running.http.headers["authorization"] = "Bearer sesame"
        yield running


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Any]]:
    """A page, and what went wrong on it."""
    pages = []

    def open_(url: str, mode: str = "text", rule: str = "product", **options: Any) -> tuple[Any, list[str]]:
        page = browser.new_page(viewport={"width": 1180, "height": 900}, **options)
        page.set_default_timeout(1000 * PATIENCE)
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text) if message.type in COMPLAINTS else None)
        page.on(
            "request",
            lambda request: None if request.url.startswith((url[:18], "data:")) else wrong.append(request.url),
        )
        page.goto(url)
        page.locator("#status", has_text="r").wait_for()
        if "#" not in url:
            page.get_by_label("As", exact=True).select_option(mode)
            page.get_by_label("Rule", exact=True).select_option(rule)
        pages.append(page)
        return page, wrong

    yield open_
    for page in pages:
        page.close()


def generate(page: Any, prompt: str, tokens: int = 8) -> None:
    page.get_by_label("Prompt", exact=True).fill(prompt)
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
    generate(page, "ab")
    beside = {
        name: page.locator(f'.beside [data-name="{name}"] .tokens').inner_text() for name in ("base", "three", "six")
    }
    cut = "… cut off here"
    assert beside == {"base": f"cdefghab{cut}", "three": f"c3defgha{cut}", "six": f"cdef6gha{cut}"}
    assert page.locator("#before").inner_text() == "ab"
    again, wrong_again = opened(page.url)
    assert again.get_by_label("Prompt", exact=True).input_value() == "ab"
    assert again.get_by_label("Rule", exact=True).input_value() == "product"
    assert again.get_by_label("each member alone").is_checked()
    assert wrong == wrong_again == []


def test_a_key_is_asked_for_and_hostile_texts_stay_texts(hostile: Running, opened: Any) -> None:
    link = '#{"prompt": "<img src=x onerror=alert(1)>ab", "weights": {"three": "x"}, "off": 3}'
    page, wrong = opened(hostile.url + "/" + link)
    page.locator("#status.wrong", has_text="this server asks for a key").wait_for()
    key = page.get_by_label("This server asks for a key")
    assert page.evaluate("document.activeElement.id") == "key"
    key.fill("simsalabim")
    page.keyboard.press("Enter")
    page.locator("#status.wrong", has_text="this is not the server’s key").wait_for()
    assert_accessible(page)
    key.fill("sesame")
    page.keyboard.press("Enter")
    page.locator("#status:not(.wrong)", has_text="as in the link").wait_for()
    assert not key.is_visible()
    assert page.locator("h1").inner_text() == "letters"
    assert ["401" in each for each in wrong] == [True, True], wrong  # one a try, which the browser itself notes
    wrong.clear()
    generate(page, "ab")
    text = page.locator("#output").inner_text()
    assert HOSTILE["3"] in text
    assert HOSTILE["6"] in text
    page.locator('#output .t[data-owner="1"]').hover()
    assert HOSTILE["3"] in page.locator("#panel").inner_text()
    assert page.title() == "tessellm playground"
    assert page.locator("#output script, #output img, #panel img").count() == 0
    assert "sesame" not in page.url
    assert wrong == []


def test_a_chat_message_goes_through_the_template(letters: Running, opened: Any) -> None:
    page, wrong = opened(letters.url, mode="chat", rule="mixture")
    page.get_by_label("each member alone").check()
    generate(page, "ab")
    messages: Any = [{"role": "user", "content": "ab"}]
    options: Any = {"messages": messages, "max_tokens": 8, "temperature": 0}
    client = letters.client()
    said = client.chat.completions.create(model="letters", **options).choices[0].message.content
    assert page.locator("#output").inner_text() == said != ""
    assert page.locator("#before").inner_text() == ""
    three = client.chat.completions.create(model="letters:three", **options).choices[0].message.content
    assert page.locator('.beside [data-name="three"] .tokens .t').inner_text() == three
    assert wrong == []


def test_a_conversation_has_a_system_prompt_and_several_turns(letters: Running, opened: Any) -> None:
    page, wrong = opened(letters.url, mode="chat", rule="mixture")
    assert page.get_by_role("button", name="Reply").is_hidden()
    page.get_by_label("System prompt").fill("be brief")
    generate(page, "ab")
    first = page.locator("#output").inner_text()
    page.get_by_role("button", name="Reply").click()
    assert page.locator("#turns li").all_inner_texts() == ["you ab", f"composed {first}"]
    assert page.get_by_label("Prompt", exact=True).input_value() == page.locator("#output").inner_text() == ""
    generate(page, "cd")
    said = [("system", "be brief"), ("user", "ab"), ("assistant", first), ("user", "cd")]
    messages: Any = [{"role": role, "content": content} for role, content in said]
    answer = letters.client().chat.completions.create(model="letters", messages=messages, max_tokens=8, temperature=0)
    assert page.locator("#output").inner_text() == answer.choices[0].message.content
    again, wrong_again = opened(page.url)
    assert again.locator("#turns li").count() == 2
    again.get_by_role("button", name="New chat").click()
    assert again.locator("#turns").is_hidden()
    assert wrong == wrong_again == []


def test_chat_is_the_default_where_there_is_a_template(letters: Running, hostile: Running, browser: Any) -> None:
    for running, mode in ((letters, "chat"), (hostile, "text")):
        page = browser.new_page(extra_http_headers={"authorization": "Bearer sesame"})
        page.goto(running.url)
        page.locator("#status", has_text="ready").wait_for()
        assert page.get_by_label("As", exact=True).input_value() == mode
        assert page.get_by_label("System prompt").is_visible() == (mode == "chat")
        assert page.locator("#mode option", has_text="chat").is_disabled() == (mode == "text")
        page.close()


def test_belief_shows_which_law_speaks(letters: Running, opened: Any) -> None:
    page, wrong = opened(letters.url, mode="chat", rule="mixture")
    generate(page, "ab")
    asked = {"model": "letters", "messages": [{"role": "user", "content": "ab"}], "max_tokens": 8, "temperature": 0}
    answer = letters.post("/v1/chat/completions", json={**asked, "tessellm": {"trace": True}})
    trace = answer.json()["choices"][0]["tessellm"]["trace"]
    belief = trace[2]["belief"]
    assert list(belief) == ["base", "three", "six", "Eq. 2"]
    assert abs(sum(belief.values()) - 1) < 1e-3
    page.locator("#output .t").nth(2).focus()
    panel = page.locator("#panel")
    assert f"speaks: {max(belief, key=lambda law: belief[law])}" in panel.inner_text()
    assert panel.locator("th[scope=col]").all_inner_texts() == ["who", "this token", "belief", "share", "favourites"]
    row = panel.locator("tbody tr", has_text="three").locator("td").nth(1)
    assert row.inner_text() == f"{100 * belief['three']:.1f} %"
    assert panel.locator("tbody tr", has_text="Eq. 2").count() == 1
    assert page.locator("#band rect").count() == 8 * 4
    first = max(trace[0]["belief"], key=lambda law: trace[0]["belief"][law])
    assert f"Where the answer begins: {first}" in page.locator("#believed").inner_text()
    assert "speaks at" in (page.locator("#band").get_attribute("aria-label") or "")
    assert_accessible(page)
    page.get_by_label("Rule", exact=True).select_option("product")
    page.locator("#belief").wait_for(state="hidden")
    assert wrong == []


def test_rules_stand_side_by_side_with_a_line_on_each(letters: Running, opened: Any) -> None:
    page, wrong = opened(letters.url)
    page.get_by_label("each rule").check()
    generate(page, "ab")
    about = letters.get("/v1/models/letters").json()["tessellm"]
    assert list(about["summaries"]) == about["rules"] == ["mixture", "product"]
    assert page.locator("#rule-line").inner_text() == about["summaries"]["product"]
    for rule in about["rules"]:
        card = page.locator(f'.beside [data-name="rule {rule}"]')
        assert card.locator(".note").inner_text() == about["summaries"][rule]
        asked = {"model": "letters", "prompt": "ab", "max_tokens": 8, "temperature": 0, "tessellm": {"rule": rule}}
        text = letters.post("/v1/completions", json=asked).json()["choices"][0]["text"]
        assert "".join(card.locator(".t").all_inner_texts()) == text
    assert wrong == []


def events(*choices: dict[str, Any]) -> str:
    pieces = [json.dumps({"choices": [{"index": 0, **choice}]}) for choice in choices]
    return "".join(f"data: {piece}\n\n" for piece in [*pieces, "[DONE]"])


def test_a_member_that_ends_at_once_and_one_that_is_refused_say_so(letters: Running, opened: Any) -> None:
    page, wrong = opened(letters.url)

    def answer(route: Any) -> None:
        model = route.request.post_data_json["model"]
        if model == "three":
            route.fulfill(content_type="text/event-stream", body=events({"text": "", "finish_reason": "stop"}))
        elif model == "six":
            route.fulfill(status=200, content_type="text/event-stream", body='data: {"error": {"message": "no"}}\n\n')
        else:
            route.continue_()

    page.route("**/v1/completions", answer)
    page.get_by_label("each member alone").check()
    generate(page, "ab")
    assert page.locator('.beside [data-name="three"] .end').inner_text() == "ends at once, without a word"
    assert page.locator('.beside [data-name="six"] .end.wrong').inner_text() == "no"
    assert page.locator('.beside [data-name="base"] .end').inner_text() == "… cut off here"
    assert page.locator("#ending").inner_text() == "… cut off here"
    assert wrong == []


def test_spaces_are_seen_and_a_new_text_forgets_the_old_ones_token(letters: Running, opened: Any) -> None:
    page, wrong = opened(letters.url)
    generate(page, "ab")
    page.locator("#output .t").nth(1).focus()
    assert page.locator("#panel table").count() == 1
    page.get_by_role("button", name="Generate").click()
    page.locator("#panel", has_text="Point at a token").wait_for()
    finished(page)

    def spaced(route: Any) -> None:
        voices = ("base", "three", "six", "composed")
        token: dict[str, Any] = {"text": " ", "owner": "three", "clash": 0, "novel": False, "log_z": 0}
        token["logprob"] = dict.fromkeys(voices, 0)
        token["top"] = {voice: [[" ", 0], [" a", 0], ["\n", 0], ["", 0]] for voice in voices}
        choice = {"text": " ", "finish_reason": "stop", "tessellm": {"trace": [token]}}
        route.fulfill(content_type="text/event-stream", body=events(choice))

    page.route("**/v1/completions", spaced)
    generate(page, "ab")
    page.locator("#output .t").first.hover()
    assert page.locator("#panel b").inner_text() == "␣"
    codes = page.locator("#panel tbody tr").first.locator("code").all_inner_texts()
    assert codes == ["␣", "␣a", "↵", "∅"]
    assert page.locator("#ending").inner_text() == "end"
    assert wrong == []


def test_a_stream_that_breaks_off_and_a_rule_that_there_is_not_are_told(letters: Running, opened: Any) -> None:
    page, wrong = opened(letters.url + '/#{"rule": "produkt", "mode": "text", "turns": [{"role": "system"}, 5]}')
    assert page.get_by_label("Rule", exact=True).input_value() == "mixture"
    cut_off = events({"text": "", "finish_reason": None, "tessellm": {"trace": []}}).removesuffix("data: [DONE]\n\n")
    page.route("**/v1/completions", lambda route: route.fulfill(content_type="text/event-stream", body=cut_off))
    page.get_by_role("button", name="Generate").click()
    page.locator("#status.wrong", has_text="the server stopped in the middle of the answer").wait_for()
    assert page.get_by_role("button", name="Stop").is_disabled()
    assert wrong == []


def test_examples_fill_the_prompt_and_top_p_is_sent(letters: Running, opened: Any) -> None:
    page, wrong = opened(letters.url)
    examples = page.get_by_label("Example prompts")
    examples.select_option(index=2)
    assert "17 + 25" in page.get_by_label("Prompt", exact=True).input_value()
    page.get_by_label("As", exact=True).select_option("chat")
    examples.select_option(index=1)
    assert page.get_by_label("Prompt", exact=True).input_value() == "What is the capital of Norway?"
    page.get_by_label("Top-p").fill("0.5")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Generate").click()
    assert sent.value.post_data_json["top_p"] == 0.5
    finished(page)
    assert wrong == []


def assert_accessible(page: Any) -> None:
    """No rule of axe is broken: names, roles, contrast, landmarks, order."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    assert [(each["id"], [node["html"][:200] for node in each["nodes"]]) for each in found] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_used_without_seeing_or_a_mouse(letters: Running, opened: Any, scheme: str) -> None:
    page, wrong = opened(letters.url, color_scheme=scheme)
    assert_accessible(page)
    page.get_by_label("each member alone").check()
    generate(page, "ab")
    page.locator("#output .t").nth(1).focus()
    assert_accessible(page)
    assert page.get_by_role("listbox").get_by_role("option").count() == 8
    assert page.get_by_role("option", name="3, three").get_attribute("aria-selected") == "true"
    assert page.locator("#status[role=status]").inner_text().startswith("8 tokens")
    page.get_by_label("Prompt", exact=True).focus()
    page.keyboard.press("Control+Enter")
    finished(page)
    order = [page.evaluate("document.activeElement.id || document.activeElement.getAttribute('aria-label')")]
    for _ in range(17):
        page.keyboard.press("Tab")
        order.append(page.evaluate("document.activeElement.id || document.activeElement.getAttribute('aria-label')"))
    experts = ["three takes part", "weight-1", "six takes part", "weight-2"]
    rest = ["rule", "mode", "tokens", "temperature", "top_p", "seed", "compare", "rules", "c, base"]
    assert order == ["prompt", "example", "go", "share", *experts, *rest, "panel"]
    page.set_viewport_size({"width": 360, "height": 800})
    assert_accessible(page)
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
    page.get_by_label("Prompt", exact=True).fill("a" * 300)
    page.get_by_role("button", name="Generate").click()
    page.locator("#status.wrong", has_text="there is room for 128").wait_for()


def test_the_route_is_shown_and_an_example_changes_it(opened: Any, chatting: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "routed"
    tessellm.compose(**chatting, rule="mixture").save_pretrained(folder)
    with serving(folder, tmp_path / "log.txt", "--slots", "4", "--context", "256") as running:
        page, wrong = opened(running.url, "chat", "mixture")
        generate(page, "what is 2+2?", 4)
        first = page.locator("#routed").inner_text()
        selected = page.locator("#routed b").inner_text()
        assert first.startswith(f"Routed to {selected}: ")
        assert "%" in first
        other = "one" if selected != "one" else "two"
        page.get_by_label("This should have been").select_option(other)
        page.get_by_role("button", name="Show the effect").click()
        page.locator("#changes", has_text=f"As an example of {other}").wait_for()
        assert "There are no other examples" in page.locator("#changes").inner_text()
        assert "The base keeps" in page.locator("#changes").inner_text()
        assert examples_in(folder) == PROMPTLESS
        page.get_by_role("button", name="Save as an example").click()
        page.locator("#changes", has_text="Saved in the composition's folder").wait_for()
        assert examples_in(folder) == {**PROMPTLESS, other: ["what is 2+2?"]}
        page.get_by_role("button", name="Generate").click()
        finished(page)
        assert page.locator("#routed").inner_text() != first
        page.get_by_label(other, exact=True).focus()
        page.keyboard.press("Home")  # with a weight of the request's own nobody routes
        page.locator("#route").wait_for(state="hidden")
        finished(page)
        assert wrong == []


PROMPTLESS: dict[str, Any] = {"base": None, "one": None, "two": None}


def examples_in(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    return {entry["name"]: entry.get("examples") for entry in config["members"]}
