"""What the tests on the shared real broker see of it."""

from collections.abc import Iterator

import pytest

from tests.consumers.harness import BrokerView
from tests.servers.kafka_broker import KafkaBroker


@pytest.fixture
def broker_view(kafka_broker: KafkaBroker) -> Iterator[BrokerView]:
    view = BrokerView(kafka_broker.bootstrap_servers)
    yield view
    view.close()
