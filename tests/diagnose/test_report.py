"""Pages and terminals: complete, and inert whatever a token, a name or a prompt holds."""

import io
import json
import re

import pytest
import torch

import tessellm
from tessellm.diagnose.shown import LINES, PALETTE, colour, in_terminal, line_style
from tessellm.diagnose.speaking import Terminal, generate_traced
from tessellm.text.options import TextOptions
from tessellm.text.visible import visible

from planted import HOSTILE, composition, hostile_tokenizer, prompts

BIDI = [*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C]


def data_of(page: str) -> dict:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(found)


def test_signs_for_what_would_act():
    assert visible("a\x1b[31mb\x7f\x00") == "a␛[31mb␡␀"
    assert visible("a\nb\tc") == "a\nb\tc"
    assert visible("a\nb", keep="") == "a␊b"
    for code in BIDI:
        assert visible(chr(code)) == f"⟨U+{code:04X}⟩"
    assert visible("\u2028\ud800\ufeff\u009b") == "⟨U+2028⟩⟨U+D800⟩⟨U+FEFF⟩⟨U+009B⟩"
    assert visible("né 漢 שלום 👩‍🚀") == "né 漢 שלום 👩‍🚀"


def test_every_owner_looks_different():
    looks = {(colour(owner), line_style(owner)) for owner in range(1, len(PALETTE) * len(LINES) + 1)}
    assert len(looks) == len(PALETTE) * len(LINES)
    assert in_terminal("x", 0) == "x"
    assert in_terminal("a\n\x1bb", 1) == "\x1b[38;5;33ma\x1b[0m\n\x1b[38;5;33m␛b\x1b[0m"


def test_the_page_is_complete_and_loads_nothing():
    diagnosis = tessellm.diagnose(composition("three", "other_three", "six"), prompts(), max_new_tokens=24)
    page = diagnosis.to_html()
    data = data_of(page)
    assert data["voices"] == ["base", "three", "other_three", "six", "composed"]
    assert len(data["rows"]) == diagnosis.tokens == page.count('data-i="')
    assert page.count("<svg") == 4
    assert not re.findall(r"""(?:src|href)\s*=|url\(|@import|https?://""", page)
    for advice in diagnosis.advice:
        assert advice.text[:40] in page
    row = data["rows"][5]
    trace = diagnosis.traces[0]
    position = trace.scored[0].nonzero()[5, 0]
    assert data["strings"][row["token"]] == trace.token_texts(0)[position]
    assert row["kl"] == pytest.approx(trace.divergence[0, position].tolist(), abs=1e-4)
    assert [len(top) for top in row["top"]] == [5] * 5


def test_hostile_tokens_are_inert():
    model = composition("three", "other_three", "six")
    model.tokenizer = hostile_tokenizer()
    diagnosis = tessellm.diagnose(model, prompts(), max_new_tokens=24)
    for page in (diagnosis.to_html(), tessellm.trace(model, diagnosis.traces[0].tokens).to_html()):
        assert not re.search(r"<(?:img|script>document)", page)
        assert page.count("<script") == 2
        assert page.count("</script>") == 2
        assert "\x1b" not in page
        assert not any(chr(code) in page for code in BIDI)
        strings = data_of(page)["strings"]
        assert HOSTILE["3"] in [string.replace("␣", " ") for string in strings]
        assert "{{data}}" in page  # a token is no placeholder


def test_what_a_terminal_shows():
    model = composition("three", "other_three", "six", rule="mixture")
    model.tokenizer = hostile_tokenizer()
    stream = io.StringIO()
    terminal = Terminal(stream, model.config.member_names)
    results = list(generate_traced(model, ["ab"], TextOptions(max_new_tokens=8), 1, terminal))
    shown = stream.getvalue()
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert re.search(r"c\[(three|other_three)\|", shown)
    assert shown.endswith("]g\n") or "six|" in shown
    (result, trace), *_ = results
    assert result.tokens == 8
    assert trace.scored.all()
    assert visible(result.text) == re.sub(r"\[\w+\||\](?!0;)", "", shown.rstrip("\n")).replace("\\", "")


@pytest.mark.parametrize("engine", ["auto", "reference"])
@pytest.mark.parametrize(
    "options", [{}, {"stop": ("e",)}, {"temperature": 3.0, "seed": 5}], ids=["greedy", "stop", "drawn"]
)
def test_what_is_traced_is_what_was_written(options, engine):
    from tessellm.text.generate import generate_texts

    model = composition("three", "six", rule="mixture")
    request, prompts = TextOptions(max_new_tokens=12, **options), ["ab", "cdef"]
    plain = list(generate_texts(model, prompts, request, engine=engine))
    terminal = Terminal(io.StringIO(), model.config.member_names)
    traced = list(generate_traced(model, prompts, request, 8, terminal, engine))
    assert [result for result, _ in traced] == plain  # by the same engine: a drawn text too
    for prompt, (result, trace) in zip(prompts, traced, strict=True):
        text = model.tokenizer.decode(trace.tokens[0], skip_special_tokens=True)
        assert text.startswith(result.text)
        ids = torch.tensor(model.tokenizer(prompt)["input_ids"] + trace.tokens[0].tolist())
        whole = tessellm.trace(model, ids)
        torch.testing.assert_close(trace.logprob[0], whole.logprob[0, -trace.tokens.shape[1] :])


def test_colours_only_where_there_are_any(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    terminal = Terminal(stream, ["base", "one"])
    terminal.legend()
    terminal.piece("x\x1b", 1)
    terminal.end()
    assert stream.getvalue() == "base  \x1b[38;5;33mone\x1b[0m\n\x1b[38;5;33mx␛\x1b[0m\n"


def test_a_trace_of_several_texts_is_a_page():
    model = composition("three", "six")
    ids = torch.tensor([model.tokenizer("abc3def6g")["input_ids"], model.tokenizer("bcdefghab")["input_ids"]])
    page = tessellm.trace(model, ids).to_html()
    assert page.count('class="text"') == 2
    assert len(data_of(page)["rows"]) == 16
