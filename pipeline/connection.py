"""The Elasticsearch client: made from the settings, and asked whether it reaches anything before work begins."""

import base64
import hashlib
import re
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import structlog
from elastic_transport import ConnectionError as NodeConnectionError
from elastic_transport import TlsError, TransportError, Urllib3HttpNode
from elasticsearch import ApiError, Elasticsearch, OrjsonSerializer
from elasticsearch.serializer import NdjsonSerializer
from pydantic import SecretStr

from pipeline.retry import (
    UNKNOWN_FINGERPRINT,
    TemporaryRefusal,
    Verdict,
    call_within,
    judge_call,
    refusal,
)
from schemas.errors import SettingsError, SinkError
from schemas.settings import ElasticsearchSettings, require_no_credentials

logger = structlog.get_logger(__name__)


def connect(settings: ElasticsearchSettings) -> Elasticsearch:
    """A client that retries nothing by itself. Opens no connection yet; close it when done.

    Raises SettingsError where the addresses, the credentials or a file of theirs cannot be used. No error
    of this module holds a secret.
    """
    if not settings.urls:
        raise SettingsError('elasticsearch.urls is empty; give the address, such as ["https://search:9200"]')
    for url in settings.urls:
        _check_url(url)
    password = _secret(settings.password, settings.password_file, "password")
    api_key = _secret(settings.api_key, settings.api_key_file, "api_key")
    if api_key is not None and (password is not None or settings.username is not None):
        raise SettingsError("elasticsearch has both an api_key and a username or password; give one of them")
    if (settings.username is None) != (password is None):
        missing = "password_file" if password is None else "username"
        raise SettingsError(f"elasticsearch.{missing} is missing; a username and a password go together")
    authorization = None
    if api_key is not None:
        authorization = f"ApiKey {_encoded_api_key(api_key)}"
    elif password is not None:  # by ourselves: the client takes ASCII only
        authorization = f"Basic {_base64(f'{settings.username}:{password}')}"
    options: dict[str, Any] = {}
    if authorization is not None:
        options["headers"] = {"authorization": authorization}
    if (context := _tls_context(settings)) is not None:
        options["ssl_context"] = context
        options["verify_certs"] = context.verify_mode is ssl.CERT_REQUIRED
        options["ssl_show_warn"] = False  # where the context does not verify, it compares fingerprints
    in_clear = [url for url in settings.urls if _is_in_clear(url)]
    if in_clear and authorization is not None:
        logger.warning("credentials go over the network in clear text", urls=in_clear, advice="write https://")
    try:
        return Elasticsearch(
            list(settings.urls),
            request_timeout=settings.request_timeout_seconds,
            connections_per_node=settings.num_writers + 2,
            max_retries=0,
            retry_on_timeout=False,
            node_class=WholeReplies,
            serializers={
                "application/vnd.elasticsearch+json": OrjsonSerializer(),
                "application/vnd.elasticsearch+x-ndjson": PreparedLines(),
            },
            **options,
        )
    except ValueError as error:
        raise SettingsError(f"elasticsearch: the client cannot be made from these settings: {error}") from None


class WholeReplies(Urllib3HttpNode):
    """A node whose empty replies count as none: a reply that is cut within its headers looks like one of no body."""

    def perform_request(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """As the base class. Raises ConnectionError for a good status without a body, which nobody sends."""
        reply = super().perform_request(method, *args, **kwargs)
        if not reply.body and method != "HEAD" and 200 <= reply.meta.status < 300:
            raise NodeConnectionError("the reply was cut short")
        return reply


def _tls_context(settings: ElasticsearchSettings) -> ssl.SSLContext | None:
    """What trusts `ca_file`'s authorities and no others, and only certificates of the fingerprints, where given.

    None where neither is given: then the machine's own authorities are trusted.
    """
    ca_file, fingerprints = settings.ca_file, settings.certificate_fingerprints
    if ca_file is None and not fingerprints:
        return None
    if unencrypted := [url for url in settings.urls if urlsplit(url).scheme != "https"]:
        what = "ca_file" if ca_file is not None else "certificate_fingerprints"
        raise SettingsError(f"elasticsearch.{what} is given, and {unencrypted[0]} is not encrypted: write https://")
    context = PinnedContext(ssl.PROTOCOL_TLS_CLIENT)
    context.pins = frozenset(_fingerprint(text) for text in fingerprints)
    if ca_file is None:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE  # whoever holds the key of that very certificate is the one we mean
        return context
    if not ca_file.is_file():
        raise SettingsError(f"elasticsearch.ca_file {str(ca_file)!r} is not a file")
    try:
        context.load_verify_locations(cafile=str(ca_file))
    except (ssl.SSLError, OSError) as error:
        raise SettingsError(f"elasticsearch.ca_file {str(ca_file)!r} holds no certificate: {error}") from None
    return context


class PinnedContext(ssl.SSLContext):
    """A context that ends a handshake with a server whose own certificate has none of the SHA-256 `pins`, if any.

    The client library's `ssl_assert_fingerprint` will not do: it is content with a chain that merely contains the
    certificate, so that an impostor who appends the authority's passes; and it turns the check against `ca_file` off.
    """

    pins: frozenset[str] = frozenset()

    def wrap_socket(self, *args: Any, **kwargs: Any) -> ssl.SSLSocket:
        """As the base class, whose handshake is over when this returns."""
        connection = super().wrap_socket(*args, **kwargs)
        if self.pins:
            found = hashlib.sha256(connection.getpeercert(binary_form=True) or b"").hexdigest()
            if found not in self.pins:
                connection.close()
                raise ssl.SSLError(f"{UNKNOWN_FINGERPRINT} {found}")
        return connection


def _fingerprint(text: str) -> str:
    plain = text.replace(":", "").lower()
    if not re.fullmatch("[0-9a-f]{64}", plain):
        raise SettingsError(
            f"elasticsearch.certificate_fingerprints holds {text!r}; a SHA-256 fingerprint is 64 hexadecimal digits, "
            f"as `openssl x509 -fingerprint -sha256 -noout -in node.crt` prints it"
        )
    return plain


def _encoded_api_key(api_key: str) -> str:
    """As the header wants it: the `encoded` of Elasticsearch's reply, or made from its `id:api_key`."""
    if not re.fullmatch("[!-~]+", api_key):  # the HTTP library would quote it in its error
        raise SettingsError("elasticsearch.api_key holds spaces, line breaks or other characters that no key has")
    return _base64(api_key) if ":" in api_key else api_key


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _is_in_clear(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme == "http" and parts.hostname not in ("localhost", "127.0.0.1", "::1")


class PreparedLines(NdjsonSerializer):
    """Bulk bodies that are bytes already are sent as they are; the client's own would copy each twice, line by line,
    at four times what writing the rows as JSON takes."""

    def dumps(self, data: Any) -> bytes:
        return data if isinstance(data, bytes) else super().dumps(data)


def _check_url(url: str) -> None:
    require_no_credentials("elasticsearch.urls", url)
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port is not None
    except ValueError:
        is_whole = False
    if not is_whole:
        raise SettingsError(
            f"elasticsearch.urls holds {url!r}; write it with scheme, host and port, such as https://search:9200"
        )


def _secret(value: SecretStr | None, file: Path | None, name: str) -> str | None:
    if file is None:
        return value.get_secret_value() if value is not None else None
    if value is not None:
        raise SettingsError(f"elasticsearch.{name} and elasticsearch.{name}_file are both given; give one of them")
    try:
        secret = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise SettingsError(f"elasticsearch.{name}_file {str(file)!r} cannot be read: {why}") from None
    if not secret:
        raise SettingsError(f"elasticsearch.{name}_file {str(file)!r} is empty")
    return secret


def check_reachable(
    client: Elasticsearch,
    settings: ElasticsearchSettings,
    stop: threading.Event | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Waits for an answer about the cluster's health, for connect_timeout_seconds at most.

    Raises SinkError with what is wrong: nobody listens, credentials refused, certificate not trusted, another server.
    """
    timeout = settings.connect_timeout_seconds
    asking = client.options(request_timeout=timeout)
    addresses = ", ".join(settings.urls)

    def ask() -> None:
        try:
            asking.cluster.health(timeout=f"{max(1, int(timeout / 2))}s")
        except (ApiError, TransportError) as error:
            if isinstance(error, ApiError) and error.meta.status == 403:
                return  # it is there and knows us; that we may not see its health is no harm
            judgement = judge_call(error)
            if judgement.verdict is Verdict.RETRY and not isinstance(error, TlsError):
                raise refusal(judgement) from None
            raise SinkError(_why_not(error, addresses, settings)) from None

    try:
        call_within(timeout, ask, stop=stop, clock=clock)
    except TemporaryRefusal as error:
        hint = " (is it https?)" if "without response" in str(error) or "BadStatusLine" in str(error) else ""
        raise SinkError(
            f"Elasticsearch does not answer at {addresses} within {timeout:g} s ({error}): "
            f"start it, or correct elasticsearch.urls{hint}"
        ) from None


def _why_not(error: ApiError | TransportError, addresses: str, settings: ElasticsearchSettings) -> str:
    if isinstance(error, TlsError):
        said = str(error.message)
        if UNKNOWN_FINGERPRINT in said:
            return (
                f"the certificate of {addresses} is not one of elasticsearch.certificate_fingerprints ({said}); "
                f"the fingerprint of its authority does not do: for that give the authority's certificate as ca_file"
            )
        if "CERTIFICATE_VERIFY_FAILED" in said:
            return (
                f"the certificate of {addresses} is not trusted ({said}): elasticsearch.ca_file must hold the "
                f"authority that signed it, and elasticsearch.urls the name that it was made for"
            )
        return f"no TLS connection to {addresses} ({said}): is it https, is elasticsearch.ca_file right?"
    if isinstance(error, ApiError) and error.meta.status == 401:
        return f"Elasticsearch at {addresses} refuses {_credentials_name(settings)} (401)"
    return f"what answers at {addresses} is not an Elasticsearch that we can use: {error}"


def _credentials_name(settings: ElasticsearchSettings) -> str:
    if settings.api_key is not None or settings.api_key_file is not None:
        return "the API key: check elasticsearch.api_key_file, and that the key is neither expired nor invalidated"
    if settings.username is not None:
        return f"the user {settings.username!r} or the password: check elasticsearch.username and password_file"
    return "a request without credentials: give elasticsearch.api_key_file, or username and password_file"
