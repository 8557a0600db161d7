"""Whether a sentence about a restaurant tells one slot of its record. Knows the E2E records' slots."""

from __future__ import annotations

import re

PRICES = {
    "cheap": "cheap|low|inexpensive|affordable|budget",
    "less than £20": "less than|under|below|cheap|low|inexpensive|20|affordable",
    "moderate": "moderate|mid|average|medium|reasonabl|fair",
    "£20-25": "20|25|moderate|average|mid|medium",
    "high": "high|expensive|upscale|pricey|costly|up-?market",
    "more than £30": "more than|over|above|30|expensive|high|upwards",
}
RATINGS = {
    "low": "low|poor|bad|not|1|one",
    "average": "average|3|three|decent|mid|medium|moderate",
    "high": "high|5|five|excellent|great|well|good|top",
    "1 out of 5": "1|one|low|poor",
    "3 out of 5": "3|three|average",
    "5 out of 5": "5|five|high|excellent",
}
CHILDREN = "famil|kid|child"
NOT_FOR_CHILDREN = (
    r"(not|n't|non|isn|un|no|adult|without)[^.]{0,30}(famil|kid|child)|adults? only"
    r"|(famil|kid|child)\w*[- ]*(unfriendly|are not)|(famil|kid|child)[^.]{0,20}: ?no"
)


def told(slot: str, value: str, text: str) -> bool:
    """Return whether the text says that the slot has this value, in one of the usual ways."""
    text, value = text.lower(), value.lower()
    if slot == "familyFriendly":
        negated = bool(re.search(NOT_FOR_CHILDREN, text))
        return negated if value == "no" else bool(re.search(CHILDREN, text)) and not negated
    if slot == "priceRange":
        return bool(re.search(PRICES.get(value, re.escape(value)), text))
    if slot == "customer rating":
        return bool(re.search(RATINGS.get(value, re.escape(value)), text))
    if slot == "food":
        alike = {"english": "british", "fast food": "fast"}.get(value)
        return value in text or value[:5] in text or (alike is not None and alike in text)
    if slot == "eatType":
        return value in text or value.split()[-1] in text
    if slot == "area":
        return bool(re.search("river" if "river" in value else r"cit(y|ies)|cent(re|er)|downtown|town", text))
    return value.replace("é", "e") in text.replace("é", "e")
