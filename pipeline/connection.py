"""The Elasticsearch client: made from the settings, and asked whether it reaches anything before work begins."""

import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from elastic_transport import TlsError, TransportError
from elasticsearch import ApiError, Elasticsearch, OrjsonSerializer
from pydantic import SecretStr

from pipeline.retry import TemporaryRefusal, Verdict, call_until_taken, judge_call, refusal
from schemas.errors import SettingsError, SinkError
from schemas.settings import ElasticsearchSettings

CHECK_BACKOFF_SECONDS = 1.0


def connect(settings: ElasticsearchSettings) -> Elasticsearch:
    """A client that retries nothing by itself. Opens no connection yet; close it when done.

    Raises SettingsError where the addresses, the credentials or a file of theirs cannot be used; no secret is in it.
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
    if settings.ca_file is not None and not settings.ca_file.is_file():
        raise SettingsError(f"elasticsearch.ca_file {str(settings.ca_file)!r} is not a file")
    credentials: dict[str, Any] = {}
    if api_key is not None:
        credentials["api_key"] = api_key
    if password is not None:
        credentials["basic_auth"] = (settings.username, password)
    try:
        if settings.ca_file is not None:  # by ourselves: the client would notice a bad file at its first call only
            credentials["ssl_context"] = ssl.create_default_context(cafile=str(settings.ca_file))
        return Elasticsearch(
            list(settings.urls),
            request_timeout=settings.request_timeout_seconds,
            connections_per_node=settings.num_writers + 2,
            max_retries=0,
            retry_on_timeout=False,
            serializers={"application/vnd.elasticsearch+json": OrjsonSerializer()},
            **credentials,
        )
    except (ValueError, OSError) as error:  # a CA file that holds no certificate, for one
        raise SettingsError(f"elasticsearch: the client cannot be made from these settings: {error}") from None


def _check_url(url: str) -> None:
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme not in ("http", "https") or not parts.hostname or port is None:
        raise SettingsError(
            f"elasticsearch.urls holds {without_credentials(url)!r}; write it with scheme, host and port, "
            f"such as https://search:9200"
        )
    if parts.username is not None or parts.password is not None:
        raise SettingsError(
            f"elasticsearch.urls holds credentials in {without_credentials(url)!r}; "
            f"give them as username and password_file, or as api_key_file"
        )


def without_credentials(url: str) -> str:
    """The address without what may stand before an @."""
    scheme, separator, rest = url.rpartition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


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
    stop = stop if stop is not None else threading.Event()
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
            raise SinkError(_why_not(error, addresses)) from None

    try:
        call_until_taken(
            ask, stop=stop, max_backoff_seconds=CHECK_BACKOFF_SECONDS, deadline=clock() + timeout, clock=clock
        )
    except TemporaryRefusal as error:
        raise SinkError(
            f"Elasticsearch does not answer at {addresses} within {timeout:g} s ({error}): "
            f"start it, or correct elasticsearch.urls"
        ) from None


def _why_not(error: ApiError | TransportError, addresses: str) -> str:
    if isinstance(error, TlsError):
        return f"no TLS connection to {addresses} ({error.message}): is it https, is elasticsearch.ca_file right?"
    if isinstance(error, ApiError) and error.meta.status == 401:
        return (
            f"Elasticsearch at {addresses} refuses the credentials (401): "
            f"check elasticsearch.username and password_file, or api_key_file"
        )
    return f"what answers at {addresses} is not an Elasticsearch that we can use: {error}"
