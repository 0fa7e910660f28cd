"""The parts of the router that handlers share, and the keys of a request's own values."""

from __future__ import annotations

from dataclasses import dataclass, field

from aiohttp import web

from penstock_client import Fleet
from penstock_router.admission.admission import Admission
from penstock_router.admission.api_keys import Key, Keys
from penstock_router.admission.shared_budget import SharedBudget
from penstock_router.apis.base import ErrorForm
from penstock_router.config import RouterConfig
from penstock_router.generation.event_ids import CursorCodec
from penstock_router.generation.resumable_streams import LiveStreams
from penstock_router.generation.tool_pauses import ToolPauses
from penstock_router.images.images import Images
from penstock_router.observe.exposition import Exposition
from penstock_router.observe.key_usage import KeyUsage
from penstock_router.observe.metrics import Metrics
from penstock_router.observe.request_record import Records, RequestRecord
from penstock_router.offload.dispatch import Bodies
from penstock_router.served_models import Models
from penstock_router.store.background_responses import Background
from penstock_router.store.response_store import ResponseStore
from penstock_router.thread_pool import Threads


@dataclass(frozen=True, slots=True)
class Router:
    """The parts of the router that handlers use."""

    config: RouterConfig
    fleet: Fleet
    models: Models
    threads: Threads
    bodies: Bodies
    images: Images
    # Memory that slow clients hold: arriving bodies, unread answers, streams without a reader.
    memory: SharedBudget
    admission: Admission
    metrics: Metrics
    exposition: Exposition
    cursors: CursorCodec
    live_streams: LiveStreams
    responses: ResponseStore
    background: Background
    keys: Keys
    usage: KeyUsage
    pauses: ToolPauses
    records: Records = field(default_factory=Records)


ROUTER = web.AppKey("router", Router)
REQUEST_ID = web.RequestKey("request_id", str)
# The form of this request's errors: the route's, or that of the API that its body is for.
ERROR_FORM = web.RequestKey("error_form", ErrorForm)
RECORD = web.RequestKey("record", RequestRecord)
# The API key of the request, if it is a known one.
KEY = web.RequestKey("key", Key)
