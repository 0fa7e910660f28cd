"""The supported values of `format`, in keywords that llguidance handles correctly.

A pattern may allow less than the standard: no leap seconds, no years before 1000, only internet
addresses in ASCII, only regular expressions in a syntax that all dialects share. Formats that no
standard defines are annotations.
"""

from __future__ import annotations

from typing import Any

_YEAR = "[1-9][0-9]{3}"
_LEAP_YEAR = "(?:[1-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])|(?:0[13-9]|1[0-2])-(?:29|30)"
    f"|(?:0[13578]|1[02])-31)|{_LEAP_YEAR}-02-29)"
)
_HOUR = "(?:[01][0-9]|2[0-3])"
_TIME = rf"{_HOUR}:[0-5][0-9]:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR}:[0-5][0-9])"

# URIs as in RFC 3986, but the authority's host is a name or an IPv4 address.
_CHARACTER = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_NO_COLON = r"(?:[A-Za-z0-9._~!$&'()*+,;=@-]|%[0-9A-Fa-f]{2})"
_TAIL = rf"(?:\?(?:{_CHARACTER}|[/?])*)?(?:#(?:{_CHARACTER}|[/?])*)?"
_AUTHORITY = (
    r"//(?:(?:[A-Za-z0-9._~!$&'()*+,;=:-]|%[0-9A-Fa-f]{2})*@)?"
    r"(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*(?::[0-9]*)?"
)
_PATHS = rf"(?:/{_CHARACTER}*)*"
_RELATIVE = rf"(?:{_AUTHORITY}{_PATHS}|/(?:{_CHARACTER}+{_PATHS})?|{_NO_COLON}+{_PATHS}|)"
_LABEL = "[A-Za-z0-9](?:-?[A-Za-z0-9]){0,30}"
_POINTER = "(?:/(?:[^/~]|~[01])*)*"
_VARIABLE = r"(?:[A-Za-z0-9_]|%[0-9A-Fa-f]{2})+"
_CHANGED = rf"{_VARIABLE}(?::[1-9][0-9]{{0,3}}|\*)?"
_VARIABLES = rf"\{{[+#./;?&]?{_CHANGED}(?:,{_CHANGED})*\}}"

# Regular expressions in the syntax that all dialects share: no counts, and no nested groups.
_PLAIN = r"[A-Za-z0-9 _,:;<>=!@#%&~/'\"-]|\\[dDwWsS.*+?^${}()|/\[\]\\]"
_ATOM = rf"(?:{_PLAIN}|\.|\[\^?(?:a-z|A-Z|0-9|[A-Za-z0-9_ .]|\\[dws])+\])[*+?]?"
_GROUP = rf"\((?:\?:)?(?:{_ATOM})+(?:\|(?:{_ATOM})+)*\)[*+?]?"
_REGEX = rf"\^?(?:{_ATOM}|{_GROUP})*(?:\|(?:{_ATOM}|{_GROUP})+)*\$?"

_DIGIT = "[0-9a-fA-F]"
_UUID = f"{_DIGIT}{{8}}(?:-{_DIGIT}{{4}}){{3}}-{_DIGIT}{{12}}"


def _uuid(version: int) -> str:
    return (
        f"{_DIGIT}{{8}}-{_DIGIT}{{4}}-{version}{_DIGIT}{{3}}-[89abAB]{_DIGIT}{{3}}-{_DIGIT}{{12}}"
    )


def _pattern(text: str) -> dict[str, Any]:
    return {"pattern": f"^(?:{text})$"}


FORMATS: dict[str, dict[str, Any]] = {
    # llguidance supports these itself.
    "duration": {"format": "duration"},
    "email": {"format": "email"},
    "hostname": {"format": "hostname"},
    "ipv4": {"format": "ipv4"},
    "ipv6": {"format": "ipv6"},
    "uri": {"format": "uri"},
    "uuid": _pattern(_UUID),
    # pydantic's names for UUIDs of one version.
    **{f"uuid{version}": _pattern(_uuid(version)) for version in range(1, 9)},
    "idn-email": {"format": "email"},
    "idn-hostname": _pattern(rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"),
    "iri": {"format": "uri"},
    "date": _pattern(_DATE),
    "time": _pattern(_TIME),
    "date-time": _pattern(f"{_DATE}T{_TIME}"),
    "uri-reference": _pattern(_RELATIVE + _TAIL),
    "iri-reference": _pattern(_RELATIVE + _TAIL),
    "uri-template": _pattern(rf"(?:[A-Za-z0-9._~!$&()*+,;=:@/?#\[\]-]|{_VARIABLES})*"),
    "json-pointer": _pattern(_POINTER),
    "relative-json-pointer": _pattern(f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})"),
    "regex": _pattern(_REGEX),
}
