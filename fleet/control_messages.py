"""Control messages between a controller (the control panel, the command line) and an agent.

The controller asks over a DEALER, the agent answers over a ROUTER, one msgpack frame each way. Every answer carries
the request's number. The agent's whole state travels in the answer to each heartbeat, so that a lost or late
message never leaves the two with different views. Requests are idempotent.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from fleet.manifest import KvPrecision, Manifest
from fleet.node import Bytes, Inventory, LiveLoad, PeerAddress, Port, PublicKey, Text

RequestNumber = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
DeploymentId = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{12}\Z")]
Hex = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{0,128}\Z")]
StageNumber = Annotated[int, msgspec.Meta(ge=0, le=1023)]
LongText = Annotated[str, msgspec.Meta(max_length=4096)]

StageState = Literal["receiving", "received", "starting", "ready", "restarting", "failed", "stopping"]
GatewayState = Literal["starting", "ready", "degraded", "failed"]


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", kw_only=True):
    """Base of all requests."""

    number: RequestNumber


class Hello(Request, frozen=True, tag="hello"):
    """The first message of a connection: which protocol versions the controller speaks."""

    protocol_min: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    protocol_max: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    controller_name: Text
    nonce: Hex
    """64 hex digits of the controller's; the agent's enrolment proof covers them."""


class Heartbeat(Request, frozen=True, tag="heartbeat"):
    """Are you alive, and what is your state?"""


class PrepareStage(Request, frozen=True, tag="prepare_stage"):
    """Fetch a stage's files (and the tokenizer for stage 0) over the transfer socket and check them."""

    deployment: DeploymentId
    manifest: Manifest
    stage: StageNumber


class StartStage(Request, frozen=True, tag="start_stage"):
    """Run a received stage in a child process. ``allowed_keys`` may connect to it."""

    deployment: DeploymentId
    stage: StageNumber
    device: Text
    kv_precision: KvPrecision
    allowed_keys: Annotated[tuple[PublicKey, ...], msgspec.Meta(max_length=256)]
    threads: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 0
    """Inference threads; 0 leaves the choice to OpenVINO."""
    cpus: Annotated[tuple[int, ...], msgspec.Meta(max_length=4096)] = ()
    """Processor numbers to run on; empty: all."""
    exact: bool = False
    """Compute in f32 without dynamic quantization, for comparisons token by token; slower."""


class StartGateway(Request, frozen=True, tag="start_gateway"):
    """Run the gateway of a deployment, whose stages are ready, on the node of stage 0."""

    deployment: DeploymentId
    stages: Annotated[tuple[PeerAddress, ...], msgspec.Meta(min_length=1, max_length=1024)]
    allowed_keys: Annotated[tuple[PublicKey, ...], msgspec.Meta(max_length=4096)]
    """Keys of the clients that may chat."""
    http_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    """Loopback port of the OpenAI-compatible API; 0 takes a free one."""
    context_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31)] = 0
    """Tokens that one chat may hold, as planned; 0: what the model was trained for."""
    kv_capacity_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**62)] = 0
    """Tokens of KV cache that the plan has memory for, all chats together; 0: no limit."""


class Undeploy(Request, frozen=True, tag="undeploy"):
    """Stop whatever runs or arrives for a deployment. Files stay in the store for the next one."""

    deployment: DeploymentId


class Leave(Request, frozen=True, tag="leave"):
    """Forget this controller: stop its deployments and no longer trust its key."""


class SetPaused(Request, frozen=True, tag="set_paused"):
    """Take no new deployments, or take them again. Only the PC's owner may ask, with the node's own key."""

    paused: bool


class Quit(Request, frozen=True, tag="quit"):
    """End the agent. Only the PC's owner may ask, with the node's own key."""


ControlRequest = Hello | Heartbeat | PrepareStage | StartStage | StartGateway | Undeploy | Leave | SetPaused | Quit


class Progress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes of a transfer; ``held_bytes`` of them were in the node's store already."""

    done_bytes: Bytes
    total_bytes: Bytes
    held_bytes: Bytes = 0


class StageStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stage on a node."""

    deployment: DeploymentId
    model: Text
    stage: StageNumber
    first_layer: StageNumber
    end_layer: StageNumber
    state: StageState
    device: Text = ""
    detail: LongText = ""
    """Why, in words, where the state needs it."""
    loaded: LongText = ""
    """Whether the stage's process imported a compiled shard or compiled it, and then why."""
    progress: Progress | None = None
    port: Port | None = None
    restarts: Annotated[int, msgspec.Meta(ge=0)] = 0
    memory_bytes: Bytes = 0
    """Resident memory of the stage's process."""


class GatewayStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A gateway on a node. ``ready``: a probe token has just gone through every stage and back."""

    deployment: DeploymentId
    model: Text
    state: GatewayState
    detail: LongText = ""
    port: Port | None = None
    http_port: Port | None = None
    stages: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0


class NodeStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything an agent says of itself in answer to a heartbeat."""

    load: LiveLoad
    paused: bool
    stages: Annotated[tuple[StageStatus, ...], msgspec.Meta(max_length=1024)]
    gateways: Annotated[tuple[GatewayStatus, ...], msgspec.Meta(max_length=1024)]
    inventory_number: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Grows when the inventory has changed; another Hello then brings the new one."""


class Reply(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", kw_only=True):
    """Base of all answers."""

    number: RequestNumber


class Welcome(Reply, frozen=True, tag="welcome"):
    """Answer to Hello. The enrolment fields are empty on a node that joined by another way."""

    protocol: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    name: Text
    inventory: Inventory
    transfer_port: Port
    token_id: Hex = ""
    token_proof: Hex = ""


class HeartbeatReply(Reply, frozen=True, tag="heartbeat_reply"):
    status: NodeStatus


class Done(Reply, frozen=True, tag="done"):
    """The request was taken; what comes of it shows in the next heartbeats."""


class Refused(Reply, frozen=True, tag="refused"):
    """The request was not carried out; ``message`` is one plain sentence."""

    message: LongText


ControlReply = Welcome | HeartbeatReply | Done | Refused


class FetchChunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="fetch"):
    """Agent to controller over the transfer socket: send these bytes of a run or file, named by its hash."""

    number: RequestNumber
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    offset: Bytes
    bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


class Chunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="chunk"):
    """Controller to agent: the header of the bytes, which are the next frame; or why there are none."""

    number: RequestNumber
    error: LongText = ""


class TransferHello(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="transfer_hello"):
    """Controller to agent, first message over the transfer socket: I serve these deployments' files."""

    protocol: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    deployments: Annotated[tuple[DeploymentId, ...], msgspec.Meta(max_length=64)]
