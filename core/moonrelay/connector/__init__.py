"""The connector: publish and consume. The only room that joins the control plane and the data plane.

`facade` is what users call; `outbox`, `spill` and `placement` are the producer's side; `claim`, `sources` and `landing`
the consumer's; `runtime` owns the parts.
"""

from moonrelay.connector.claim import PayloadClaim
from moonrelay.connector.facade import DiffusionConnector
from moonrelay.connector.publication import Publication, PublicationState

__all__ = ["DiffusionConnector", "PayloadClaim", "Publication", "PublicationState"]
