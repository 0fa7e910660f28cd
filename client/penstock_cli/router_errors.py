"""Explains failed requests to a router, in one line that says what to do."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import urllib.error
from urllib.parse import urlsplit

CUT_OFF = "the answer was cut off"
NOT_HTTP = "what answers there does not speak HTTP/1.1: is it the gRPC port of a shard?"
# The advice if an HTTP server answers at a shard's address.
ASK_AS_ROUTER = "an HTTP server answers there: ask a router as http://"
# Errors raised when the other side just closes the connection.
_CLOSED = (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)
NEEDS_KEY = "; give the right one with --api-key or PENSTOCK_API_KEY"
SHARD_NEEDS_KEY = NEEDS_KEY.replace("PENSTOCK_", "PENSTOCK_SHARD_")
# OpenSSL's codes for a certificate that is not valid yet or has expired.
_WRONG_TIME = (9, 10)
# A server can send an error of any length.
_MAX_CHARACTERS = 400


def no_answer(error: Exception, url: str) -> str:
    # urllib wraps the cause in an error whose text shows the wrapping.
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, OSError):
        error = error.reason
    if isinstance(error, ssl.SSLCertVerificationError):
        return _certificate(error)
    if isinstance(error, ssl.SSLError) and "WRONG_VERSION_NUMBER" in str(error):
        return f"it speaks no TLS: try http://{urlsplit(url).netloc}"
    if isinstance(error, TimeoutError):
        return "it does not answer in time"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused: start the router, or correct its address"
    if isinstance(error, socket.gaierror):
        return "its host name cannot be resolved: correct the address"
    if isinstance(error, _CLOSED) and url.startswith("http:"):
        netloc = urlsplit(url).netloc
        return f"it closes connections without an answer: if it speaks TLS, try https://{netloc}"
    return one_line(error)


def reason(error: Exception, url: str) -> str:
    if isinstance(error, urllib.error.HTTPError):
        with error:
            try:
                return refusal(error.code, error.read())
            except (OSError, http.client.HTTPException):
                return refusal(error.code, b"")
    if isinstance(error, ValueError) or str(error) == CUT_OFF:
        return one_line(error)
    return f"no answer from {url}: {no_answer(error, url)}"


def refusal(status: int, body: bytes) -> str:
    """Return the text of an answer with an error status, from a router or a similar server."""
    line = message_of(body) or f"the server answers {status}"
    return line + NEEDS_KEY if status == 401 else line


def message_of(body: bytes) -> str:
    """Return the message of an error's JSON, in one line; "" if there is none."""
    try:
        message = json.loads(body)["error"]["message"]
    except (KeyError, TypeError, ValueError):
        return ""
    return one_line(ValueError(message))[:_MAX_CHARACTERS]


def one_line(error: Exception) -> str:
    """Return an error's text in one line. The other side may have sent any bytes."""
    # This error's text is what came instead of a status line: usually HTTP/2 frames.
    if isinstance(error, http.client.BadStatusLine) and not isinstance(error, ConnectionError):
        return NOT_HTTP
    text = "".join(char if char.isprintable() else " " for char in str(error))
    return " ".join(text.split()) or type(error).__name__


def _certificate(error: ssl.SSLCertVerificationError) -> str:
    if error.verify_message.startswith(("Hostname mismatch", "IP address mismatch")):
        return f"{error.verify_message}: use a name that its certificate has"
    if error.verify_code in _WRONG_TIME:
        return (
            f"its certificate is not valid now ({error.verify_message}): it needs a new one "
            "(--tls-cert-file), or a clock is wrong"
        )
    return (
        f"its certificate is not trusted here ({error.verify_message}): "
        "name a file with its authority's in SSL_CERT_FILE"
    )
