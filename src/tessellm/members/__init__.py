"""Members: the base and the experts, loaded from wherever they are. Knows no rules, nor how members are composed."""

from .load import load_config, load_member, load_tokenizer
from .saved import SavedMember
from .spec import Loading, Member, MemberSpec, check_name, dtype_of

__all__ = [
    "Loading",
    "Member",
    "MemberSpec",
    "SavedMember",
    "check_name",
    "dtype_of",
    "load_config",
    "load_member",
    "load_tokenizer",
]
