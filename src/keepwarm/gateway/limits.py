"""Owns reading a body: size counted while it arrives, then UTF-8, then JSON into a wire type.

Never knows what the fields mean. Every failure is an InvalidRequest that says which field or byte is wrong.
Called by the endpoints.
"""

import re
from typing import TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive

from keepwarm.core.errors import InvalidRequest, RequestTooLarge
from keepwarm.gateway.disconnect import ClientDisconnected

T = TypeVar("T")

_AT_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_LONE_SURROGATE = re.compile(rb"\\u[dD][89abAB]|\\u[dD][c-fC-F]")


async def read_body(headers: Headers, receive: Receive, max_bytes: int) -> bytes:
    """The whole body, never holding more than `max_bytes` of it.

    Raises RequestTooLarge as soon as the announced or the counted size is over the limit, InvalidRequest for
    a compressed body, ClientDisconnected when the client goes while sending.
    """
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise InvalidRequest(
            "The body is compressed (Content-Encoding), which is not supported. Send it as plain JSON."
        )
    announced = headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and int(announced[:20]) > max_bytes:
        raise _too_large(max_bytes)
    chunks: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        chunk: bytes = message.get("body", b"")
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def _too_large(max_bytes: int) -> RequestTooLarge:
    return RequestTooLarge(
        f"The body is larger than the limit of {max_bytes:,} bytes. Send a shorter conversation, "
        "or raise the server's body limit."
    )


def decode_json(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """`body` as the decoder's wire type. Raises InvalidRequest for anything that does not fit."""
    if not body:
        raise InvalidRequest("The body is empty. Send a JSON object.")
    try:
        # msgspec skips the strings of unknown fields unread; the rule must not depend on which field it is.
        body.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"The body is not valid UTF-8 at byte {error.start}. Encode it as UTF-8."
        ) from None
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from None
    except msgspec.DecodeError as error:
        hint = ""
        if _LONE_SURROGATE.search(body):
            hint = " It holds a \\uD800-\\uDFFF escape: these must come in pairs, or not at all."
        raise InvalidRequest(
            f"The body is not valid JSON: {error}.{hint} Check how the client writes it."
        ) from None
    except RecursionError:
        raise nested_too_deeply() from None
    except (OverflowError, ValueError):
        raise InvalidRequest("The body holds a number that is out of range. Use 64-bit numbers.") from None


def nested_too_deeply() -> InvalidRequest:
    return InvalidRequest("The body is nested too deeply. Send fewer levels of arrays and objects.")


def _wrong_type(text: str) -> InvalidRequest:
    found = _AT_PATH.search(text)
    path = found["path"] if found else ""
    what = text[: found.start()] if found else text
    what = what[:1].lower() + what[1:]
    if path:
        return InvalidRequest(f"Wrong value at '{path}': {what}. Change this field.", param=path)
    missing = re.search(r"missing required field `([^`]+)`", text)
    if missing:
        return InvalidRequest(f"The field '{missing[1]}' is required. Add it to the body.", param=missing[1])
    return InvalidRequest(f"The body has the wrong form: {what}. Send a JSON object.")
