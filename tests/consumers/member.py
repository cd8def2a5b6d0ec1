"""A worker's Kafka side as a process of its own, to be killed: prints each position that it completes.

python -m tests.consumers.member BOOTSTRAP_SERVERS TOPIC ASSIGNOR MAX_POLL_INTERVAL_SECONDS
"""

import sys

from tests.consumers.harness import kafka_settings, running


def main(bootstrap_servers: str, topic: str, assignor: str, max_poll_interval_seconds: str) -> None:
    changes = {"assignor": assignor, "max_poll_interval_seconds": float(max_poll_interval_seconds)}
    if float(max_poll_interval_seconds) < 10:
        changes["session_timeout_seconds"] = 3.0
    with running(kafka_settings(bootstrap_servers, topic, **changes)) as source:
        while True:
            documents = source.poll(100, 0.2)
            for document in documents:
                print(document.position, flush=True)
            source.complete([document.position for document in documents])


if __name__ == "__main__":
    main(*sys.argv[1:])
