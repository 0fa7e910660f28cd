"""Translates between messages and types, both ways. Only this package touches the stubs."""

from penstock_proto.codec.calls import *  # noqa: F403
from penstock_proto.codec.facts import *  # noqa: F403
from penstock_proto.codec.outputs import *  # noqa: F403
from penstock_proto.codec.requests import *  # noqa: F403
