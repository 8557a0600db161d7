"""Words without their endings, and irregular forms: whether a sentence uses a word, inflected or not."""

from __future__ import annotations

ENDINGS = ("ings", "ing", "ied", "ies", "ed", "es", "s", "e", "y")
FILLERS = (
    "a an the of or and to in on for that which who whom is are be by with as from at it its this these those used "
    "being one something someone not etc especially usually often any some having"
)
STOP_WORDS = frozenset(FILLERS.split(" "))
FORMS = """
    be is are was were been am; begin began begun; bite bit bitten; blow blew blown; break broke broken;
    bring brought; build built; burn burnt; buy bought; catch caught; choose chose chosen; come came; cut cutting;
    deal dealt; dig dug; do does did done; draw drew drawn; drink drank drunk; drive drove driven; eat ate eaten;
    fall fell fallen; feed fed; feel felt; fight fought; find found; fly flew flown; foot feet;
    forget forgot forgotten; freeze froze frozen; get got gotten; give gave given; go went gone goes; grind ground;
    grow grew grown; hang hung; have has had; hear heard; hide hid hidden; hold held; keep kept; knife knives;
    know knew known; lay laid; lead led; leaf leaves; lean leant; leave left; lend lent; lie lay lying; light lit;
    lose lost; make made; man men; mean meant; meet met; pay paid; person people; ride rode ridden; ring rang rung;
    rise rose risen; run ran; say said; see saw seen; seek sought; sell sold; send sent; sew sewn;
    shake shook shaken; shine shone; shoot shot; show shown; shrink shrank; sing sang sung; sink sank sunk;
    sit sat; sleep slept; slide slid; speak spoke spoken; spend spent; spin spun; stand stood; steal stole stolen;
    stick stuck; strike struck; sweep swept; swim swam swum; swing swung; take took taken; teach taught;
    tear tore torn; tell told; think thought; throw threw thrown; tie tying; tooth teeth; wake woke;
    wear wore worn; weave wove woven; win won; wind wound; woman women; wrap wrapt; write wrote written;
    child children; shelf shelves; loaf loaves; wife wives; life lives; mouse mice; goose geese; fish fishes;
    die dying; catch catches
"""  # a word, then its forms


def stem(word: str) -> str:
    """Return a word without its ending, and without a doubled letter at the end."""
    for ending in ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            word = word[: -len(ending)]
            break
    doubled = len(word) > 3 and word[-1] == word[-2] and word[-1] not in "ls"
    return word[:-1] if doubled else word


def _irregular() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for word, *forms in (entry.split() for entry in FORMS.split(";")):
        for form in forms:
            found.setdefault(form, set()).add(word)
    return found


IRREGULAR = _irregular()  # form → words that have it
