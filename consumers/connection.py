"""How we reach the brokers: the client's options from the settings, and why a connection fails, in words."""

import logging
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kafka.cluster import collect_hosts
from kafka.errors import KafkaConnectionError, KafkaError, SaslAuthenticationFailedError
from kafka.net.compat import KafkaNetClient
from pydantic import SecretStr

from consumers.listener import ask_listener, why_refused
from schemas.errors import SettingsError, SourceError
from schemas.settings import KafkaSettings, require_no_credentials

logger = logging.getLogger(__name__)

_MAX_RECONNECT_SECONDS = 3.0  # the clients' own 30 would make a broker's short restart a long pause
_ASK_SECONDS = 3.0  # for each of two questions to a listener that has just refused us
_RETRY_SECONDS = 1.0  # between two tries while nobody is there


class _Away(Exception):
    """Nobody is there, which may change by itself."""


def client_options(settings: KafkaSettings) -> dict[str, Any]:
    """What consumer, producer and admin client have in common. Raises SettingsError where they contradict, or where an
    address is none.

    No error of this module holds a secret.
    """
    if not settings.bootstrap_servers:
        raise SettingsError("no Kafka addresses: set kafka.bootstrap_servers or PAGEMILL_KAFKA__BOOTSTRAP_SERVERS")
    for address in settings.bootstrap_servers:
        _check_address(address)
    protocol = settings.security_protocol
    options: dict[str, Any] = {
        "bootstrap_servers": list(settings.bootstrap_servers),
        "client_id": settings.client_id,
        "bootstrap_timeout_ms": _milliseconds(settings.connect_timeout_seconds),
        "reconnect_backoff_max_ms": _milliseconds(_MAX_RECONNECT_SECONDS),
        "security_protocol": protocol,
    }
    if protocol.endswith("SSL"):
        options["ssl_context"] = _tls_context(settings)
    elif unused := [name for name in ("ssl_ca_file", "ssl_certificate_file") if getattr(settings, name) is not None]:
        raise SettingsError(
            f"kafka.{unused[0]} is given, and kafka.security_protocol is {protocol!r}, which is not encrypted: "
            "write SSL or SASL_SSL"
        )
    if protocol.startswith("SASL"):
        if settings.sasl_mechanism is None or settings.sasl_username is None:
            raise SettingsError(
                f"kafka.security_protocol is {protocol}: set kafka.sasl_mechanism and kafka.sasl_username too"
            )
        options["sasl_mechanism"] = settings.sasl_mechanism
        options["sasl_plain_username"] = settings.sasl_username
        options["sasl_plain_password"] = _sasl_password(settings)
    elif settings.sasl_username is not None:
        raise SettingsError(
            f"kafka.sasl_username is given, and kafka.security_protocol is {protocol!r}, which sends no password: "
            "write SASL_SSL or SASL_PLAINTEXT"
        )
    return options


def _check_address(address: str) -> None:
    require_no_credentials("kafka.bootstrap_servers", address)
    try:
        [(host, port, _)] = collect_hosts([address])  # as the clients will read it
    except ValueError:
        host, port = "", 0
    if not host or set(host) & set(", /") or not 1 <= port <= 65535:
        raise SettingsError(
            f"kafka.bootstrap_servers holds {address!r}; write it with host and port, such as broker-1:9092 or "
            "[::1]:9092"
        )


def check_connection(
    settings: KafkaSettings,
    wait_seconds: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> KafkaSettings:
    """Tries every address until one answers as a Kafka broker that accepts us, and so does a broker that it names.

    Returns the settings with that address alone. A client that is given more picks any, and waits for 30 s for one that
    is silent, which is longer than a start may take; once it has begun it knows all brokers by what that one told.
    Where nobody is there it tries again for `wait_seconds`. Raises SourceError otherwise, within
    `connect_timeout_seconds` for each address, with its own reason: the clients themselves only ever say that they
    timed out.
    """
    deadline = clock() + wait_seconds
    is_told = False
    while True:
        try:
            return settings.model_copy(update={"bootstrap_servers": (_find_broker(settings),)})
        except _Away as away:
            if clock() >= deadline:
                raise SourceError(f"no Kafka broker can be reached. {away}. Check kafka.bootstrap_servers.") from None
            if not is_told:
                extra = {"reason": str(away), "for_at_most_seconds": wait_seconds}
                logger.warning("no Kafka broker is there yet; waiting for one", extra=extra)
                is_told = True
        sleep(_RETRY_SECONDS)


def keep_refreshing(cluster: Any) -> None:
    """Begins a client's asking for the topics' state anew where it has ended. To be called now and then.

    kafka-python 3.0.12 ends it for good with an error of a connection that comes as it is, as where TLS begins. Behind
    a broker's death such a consumer read nothing more, having missed who leads since, and such a producer sent nothing.
    """
    asking = cluster._refresh_loop_future
    if asking is not None and asking.is_done and not cluster.closed:
        cluster._refresh_loop_future = None
        cluster.start_refresh_loop()


def refresh(consumer: Any, timeout_ms: int) -> None:
    """Has a consumer's client ask for the topics' state now. Raises KafkaError or OSError where no broker tells it."""
    cluster = consumer._cluster
    for _ in range(1 + cluster.metadata_refresh_in_progress):  # an answer under way may be older than the question
        consumer._net.run(consumer._manager.wait_for, cluster.request_update(), timeout_ms)


def address_of(broker: Any) -> str:
    """Of one that the client knows, as the settings write it."""
    return f"[{broker.host}]:{broker.port}" if ":" in broker.host else f"{broker.host}:{broker.port}"


def _find_broker(settings: KafkaSettings) -> str:
    """The first address where one takes us. Raises SourceError where somebody refuses us, _Away where nobody is."""
    client = KafkaNetClient(**client_options(settings))
    client._net.start()
    away: list[str] = []
    refused: list[str] = []

    def is_accepted(node: Any, name: str) -> bool:
        try:
            client._net.run(_connect, client._manager, node.node_id, settings.connect_timeout_seconds)
        except (KafkaError, OSError) as error:
            if (reason := _absence(error, settings)) is not None:
                away.append(f"{name}: {reason}")
            elif (reason := _refusal(error, node.host, node.port, settings)) is not None:
                refused.append(f"{name}: {reason}")
            else:  # as where a port is passed on to a broker that has not started yet
                away.append(f"{name}: what answers there is no Kafka broker ({error})")
            return False
        return True

    try:
        # As Kafka's clients do: ask any address for the brokers, then go to the addresses that these give themselves.
        for node in client.cluster.bootstrap_brokers():
            address = address_of(node)
            if is_accepted(node, address):
                brokers = client.cluster.brokers()
                called = "{} (which calls itself so in its advertised.listeners; it was found at " + address + ")"
                if any(is_accepted(b, called.format(address_of(b))) for b in brokers) or not brokers:
                    return address
    finally:
        client.close()
    if refused:
        raise SourceError(f"no Kafka broker takes us. {'; '.join(refused + away)}.")
    raise _Away("; ".join(away))


async def _connect(manager: Any, node_id: Any, timeout_seconds: float) -> None:
    connection = manager.get_connection(node_id, timeout_ms=_milliseconds(timeout_seconds), pop_on_close=False)
    try:
        await manager.wait_for(connection.init_future, _milliseconds(timeout_seconds))
    except KafkaConnectionError as error:
        # A broker answers a wrong password and closes at once, and kafka-python 3.0.12 drops the answer with the
        # connection: all that is left is how far it came. The versions are asked before the password is sent.
        if connection.sasl_enabled and connection.broker_version_data is not None:
            raise SaslAuthenticationFailedError("the broker closed the connection at the password") from error
        raise
    # A listener that wants a password tells its versions to everybody, and nothing more.
    await manager.cluster.refresh_metadata(node_id)


def _absence(error: BaseException, settings: KafkaSettings) -> str | None:
    """In words, where nobody is there; None where somebody is."""
    text = str(error) or type(error).__name__
    if "ECONNREFUSED" in text or "refused" in text:
        return "nobody listens there (connection refused)"
    if "DNS" in text:
        return "the name does not resolve"
    if "imed out" in text or "imeout" in text:
        return f"no answer within {settings.connect_timeout_seconds:g} s ({text})"
    return None


def _refusal(error: BaseException, host: str, port: int, settings: KafkaSettings) -> str | None:
    """Why a broker does not take us, in words; None where it is no broker."""
    spoken = ask_listener(host, port, min(_ASK_SECONDS, settings.connect_timeout_seconds))
    if (
        isinstance(error, SaslAuthenticationFailedError)
        and spoken is not None
        and settings.security_protocol in spoken.protocols
        and settings.sasl_mechanism in (spoken.mechanisms or (settings.sasl_mechanism,))
    ):
        return (
            f"authentication failed for the Kafka user {settings.sasl_username!r} with {settings.sasl_mechanism}: "
            "check kafka.sasl_username and the password"
        )
    return why_refused(settings, str(error) or type(error).__name__, spoken)


def _tls_context(settings: KafkaSettings) -> ssl.SSLContext:
    """What trusts `ssl_ca_file`'s authorities and no others, or the machine's, and shows our certificate, if any."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # demands a certificate, and one of that name
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if (ca_file := settings.ssl_ca_file) is None:
        context.load_default_certs()
    else:
        try:
            context.load_verify_locations(cafile=str(_existing("ssl_ca_file", ca_file)))
        except (ssl.SSLError, OSError) as error:
            raise SettingsError(f"kafka.ssl_ca_file {str(ca_file)!r} holds no certificate: {error}") from None
    certificate, key = settings.ssl_certificate_file, settings.ssl_key_file
    if certificate is None:
        if key is not None:
            raise SettingsError("kafka.ssl_key_file is given without kafka.ssl_certificate_file")
        return context
    _existing("ssl_certificate_file", certificate)
    key = certificate if key is None else _existing("ssl_key_file", key)  # one file may hold both
    password = _secret(settings.ssl_key_password, settings.ssl_key_password_file, "ssl_key_password")
    try:
        # Without a password OpenSSL would ask for it at the terminal.
        context.load_cert_chain(str(certificate), str(key), password=password or "")
    except (ssl.SSLError, OSError) as error:
        if "MISMATCH" in str(error):
            why = "the key is not that of the certificate"
        elif "ENCRYPTED" in key.read_text(errors="replace"):
            what = "is wrong" if password else "is not given: set kafka.ssl_key_password_file"
            why = f"the key is encrypted, and its password {what}"
        else:
            why = f"not a certificate and its key in PEM ({error})"
        names = f"kafka.ssl_certificate_file {str(certificate)!r} and kafka.ssl_key_file {str(key)!r}"
        raise SettingsError(f"{names} cannot be used: {why}") from None
    return context


def _sasl_password(settings: KafkaSettings) -> str:
    password = _secret(settings.sasl_password, settings.sasl_password_file, "sasl_password")
    if password is None:
        raise SettingsError(
            "a SASL user needs a password: set kafka.sasl_password_file or PAGEMILL_KAFKA__SASL_PASSWORD"
        )
    return password


def _secret(value: SecretStr | None, file: Path | None, name: str) -> str | None:
    if file is None:
        return value.get_secret_value() if value is not None else None
    if value is not None:
        raise SettingsError(f"kafka.{name} and kafka.{name}_file are both given; give one of them")
    try:
        secret = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise SettingsError(f"kafka.{name}_file {str(file)!r} cannot be read: {why}") from None
    if not secret:
        raise SettingsError(f"kafka.{name}_file {str(file)!r} is empty")
    return secret


def _existing(name: str, path: Path) -> Path:
    if not path.is_file():
        raise SettingsError(f"kafka.{name} {str(path)!r}: no such file")
    return path


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
