"""What the demo asks: two prompts of each kind, and one that concerns no expert. Texts alone.

From the test data in data/real, on which nothing was trained: of each kind those with the shortest prompts, of math
those with the shortest answers, so that few tokens tell. The one that concerns no expert was chosen by hand.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Asked:
    """A prompt, the member that should answer it, and the data's answer where that is short."""

    expert: str
    prompt: str
    answer: str = ""


PUPPIES = (
    "Two thirds of Jana's puppies are Pomeranians. One third of the Pomeranians are girls. If there are 6 Pomeranian "
    "girls, how many puppies does Jana have?"
)
LOCKERS = (
    "Timothy's locker is 24 cubic inches. Zack's locker is half as big as Timothy's locker. Peter's locker is 1/4 as "
    "big as Zack's locker. How big is Peter's locker in cubic inches?"
)
COMMAND = "Give a bash command for this: "
REQUEST = "Turn this request into JSON with its intent and slots: "
SMALLEST_SUM = '''Complete this Python function.
def minSubArraySum(nums):
    """
    Given an array of integers nums, find the minimum sum of any non-empty sub-array
    of nums.
    Example
    minSubArraySum([2, 3, 4, 1, 2, 4]) == 1
    minSubArraySum([-1, -2, -3]) == -6
    """'''
SUM_OF_ODD = '''Complete this Python function.
def solution(lst):
    """Given a non-empty list of integers, return the sum of all of the odd elements that are in even positions.
    \n
    Examples
    solution([5, 8, 7, 1]) ==> 12
    solution([3, 3, 3, 3, 3]) ==> 9
    solution([30, 13, 24, 321]) ==>0
    """'''

PROMPTS = (
    Asked("math", PUPPIES, "Jana has 6*3=18 Pomeranians.\nJana has 18/2*3=27 puppies.\n#### 27"),
    Asked(
        "math",
        LOCKERS,
        "Zack's locker is 24/2=12 cubic inches.\nPeter's locker is 12/4=3 cubic inches.\n#### 3",
    ),
    Asked("bash", f"{COMMAND}Find all SUID set files", "find / -perm /u=s"),
    Asked("bash", f"{COMMAND}Force decompress all files into '/etc'", "gzip -d --force * /etc"),
    Asked(
        "intents",
        f"{REQUEST}Play All Things Must Pass.",
        '{"intent": "PlayMusic", "track": "All Things Must Pass"}',
    ),
    Asked(
        "intents",
        f"{REQUEST}Book spot for 9 at Thurmont",
        '{"intent": "BookRestaurant", "party_size_number": "9", "city": "Thurmont"}',
    ),
    Asked(
        "sql",
        "Columns of t: ATTENDANCE, RECORD, DATE. Write the SQL query for: What was the record on july 28 ?",
        "SELECT RECORD FROM t WHERE DATE = 'july 28'",
    ),
    Asked(
        "sql",
        "Columns of t: WEEK, OPPONENT, DATE. Write the SQL query for: What week was the december 24, 1994 game ?",
        "SELECT SUM WEEK FROM t WHERE DATE = 'december 24, 1994'",
    ),
    Asked("code", SMALLEST_SUM),
    Asked("code", SUM_OF_ODD),
    Asked("base", "How does democracy work in the United States?"),
)
