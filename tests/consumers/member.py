"""A worker's Kafka side as a process of its own, to be killed: prints each position that it completes.

python -m tests.consumers.member BOOTSTRAP_SERVERS TOPIC ASSIGNOR
"""

import sys

from tests.consumers.harness import kafka_settings, running


def main(bootstrap_servers: str, topic: str, assignor: str) -> None:
    with running(kafka_settings(bootstrap_servers, topic, assignor=assignor)) as source:
        while True:
            documents = source.poll(100, 0.2)
            for document in documents:
                print(document.position, flush=True)
            source.complete([document.position for document in documents])


if __name__ == "__main__":
    main(*sys.argv[1:])
