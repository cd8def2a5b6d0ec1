"""How we reach the brokers: the client's options from the settings, and why a connection fails, in words."""

import logging
from typing import Any

from kafka.errors import KafkaConnectionError, KafkaError, SaslAuthenticationFailedError
from kafka.net.compat import KafkaNetClient

from schemas.errors import SettingsError, SourceError
from schemas.settings import KafkaSettings

logger = logging.getLogger(__name__)

_MAX_RECONNECT_SECONDS = 3.0  # the clients' own 30 would make a broker's short restart a long pause


def client_options(settings: KafkaSettings) -> dict[str, Any]:
    """What consumer, producer and admin client have in common. Raises SettingsError where they contradict."""
    if not settings.bootstrap_servers:
        raise SettingsError("no Kafka addresses: set kafka.bootstrap_servers or PAGEMILL_KAFKA__BOOTSTRAP_SERVERS")
    options: dict[str, Any] = {
        "bootstrap_servers": list(settings.bootstrap_servers),
        "client_id": settings.client_id,
        "bootstrap_timeout_ms": _milliseconds(settings.connect_timeout_seconds),
        "reconnect_backoff_max_ms": _milliseconds(_MAX_RECONNECT_SECONDS),
        "security_protocol": settings.security_protocol,
    }
    if settings.security_protocol.endswith("SSL"):
        options["ssl_cafile"] = _existing_file("ssl_ca_file", settings)
        options["ssl_certfile"] = _existing_file("ssl_certificate_file", settings)
        options["ssl_keyfile"] = _existing_file("ssl_key_file", settings)
    if settings.security_protocol.startswith("SASL"):
        if settings.sasl_mechanism is None or settings.sasl_username is None:
            raise SettingsError(
                f"kafka.security_protocol is {settings.security_protocol}: "
                "set kafka.sasl_mechanism and kafka.sasl_username too"
            )
        options["sasl_mechanism"] = settings.sasl_mechanism
        options["sasl_plain_username"] = settings.sasl_username
        options["sasl_plain_password"] = _sasl_password(settings)
    return options


def check_connection(settings: KafkaSettings) -> None:
    """Tries every address until one answers as a Kafka broker that accepts us.

    Raises SourceError within `connect_timeout_seconds` otherwise, with each address's own reason: the clients
    themselves only ever say that they timed out.
    """
    options = client_options(settings)
    client = KafkaNetClient(**options)
    client._net.start()
    try:
        reasons = []
        for node in client.cluster.bootstrap_brokers():
            address = f"{node.host}:{node.port}"
            try:
                client._net.run(_connect, client._manager, node.node_id, settings.connect_timeout_seconds)
            except SaslAuthenticationFailedError as error:
                raise SourceError(
                    f"{address} refuses the Kafka user {settings.sasl_username!r}: authentication failed ({error}); "
                    "check kafka.sasl_username, kafka.sasl_mechanism and the password"
                ) from None
            except (KafkaError, OSError) as error:
                reasons.append(f"{address}: {_reason(error, settings)}")
            else:
                return
    finally:
        client.close()
    raise SourceError(f"no Kafka broker can be reached. {'; '.join(reasons)}. Check kafka.bootstrap_servers.")


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


def _reason(error: BaseException, settings: KafkaSettings) -> str:
    text = str(error) or type(error).__name__
    if "ECONNREFUSED" in text or "refused" in text:
        return "nobody listens there (connection refused)"
    if "DNS" in text:
        return "the name does not resolve"
    if "imed out" in text or "imeout" in text:
        return f"no answer within {settings.connect_timeout_seconds:g} s ({text})"
    if settings.security_protocol.endswith("SSL"):
        return f"no TLS connection ({text}); is it a TLS listener, and kafka.ssl_ca_file its authority"
    return f"{text}; is kafka.security_protocol = {settings.security_protocol!r} what this listener speaks"


def _sasl_password(settings: KafkaSettings) -> str:
    if settings.sasl_password is not None:
        return settings.sasl_password.get_secret_value()
    if settings.sasl_password_file is None:
        raise SettingsError(
            "a SASL user needs a password: set kafka.sasl_password_file or PAGEMILL_KAFKA__SASL_PASSWORD"
        )
    try:
        return settings.sasl_password_file.read_text().strip()
    except OSError as error:
        raise SettingsError(f"kafka.sasl_password_file {settings.sasl_password_file}: {error.strerror}") from None


def _existing_file(name: str, settings: KafkaSettings) -> str | None:
    path = getattr(settings, name)
    if path is not None and not path.is_file():
        raise SettingsError(f"kafka.{name} {path}: no such file")
    return str(path) if path is not None else None


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
