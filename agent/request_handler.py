"""Carries out what a controller, or the PC's owner, asks of the agent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec

from agent.agent_state import AgentState, keep_state
from agent.deployments import Deployments
from agent.live_load import LoadReader
from fleet.codec import PROTOCOL_VERSION
from fleet.control_messages import (
    ControlReply,
    ControlRequest,
    Done,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Leave,
    NodeStatus,
    PrepareStage,
    Quit,
    SetPaused,
    StartGateway,
    StartStage,
    Undeploy,
    Welcome,
)
from fleet.errors import DeployError, EnrolmentError
from fleet.identity import Identity
from fleet.node import Inventory
from fleet.trust import TrustStore
from fleet.zap import AllowList

QUIT_DELAY_S = 0.2
"""The answer to Quit is on its way by then."""


def allowed_keys(trust: TrustStore, identity: Identity) -> set[str]:
    """Who may connect: the controllers, and this node's own key, with which its owner's tray asks."""
    return {*trust.controllers(), identity.public_key}


class RequestHandler:
    """The agent's answers. Lives in the agent's event loop.

    Attributes:
        transfer_port: told to controllers; set once it is known.
        announce: tells the LAN which controller this PC belongs to (its key, or empty).

    Args:
        quit_agent: ends the agent.
    """

    def __init__(
        self,
        *,
        name: str,
        data_dir: Path,
        identity: Identity,
        trust: TrustStore,
        allow_list: AllowList,
        deployments: Deployments,
        load: LoadReader,
        inventory: Inventory,
        state: AgentState,
        quit_agent: Callable[[], None],
    ) -> None:
        self.transfer_port = 0
        self.announce: Callable[[str], None] = lambda controller: None
        self._name = name[:256]
        self._data_dir = data_dir
        self._identity = identity
        self._trust = trust
        self._allow_list = allow_list
        self._deployments = deployments
        self._load = load
        self._inventory = inventory
        self._inventory_number = 0
        self._state = state
        self._quit_agent = quit_agent

    def listens_on(self, control_port: int, transfer_port: int) -> None:
        """The ports are open; they are kept for the next start."""
        self.transfer_port = transfer_port
        self._keep(msgspec.structs.replace(self._state, control_port=control_port, transfer_port=transfer_port))

    def renew_inventory(self, inventory: Inventory) -> None:
        """The machine turned out to be otherwise; controllers see the number and greet again."""
        self._inventory = inventory
        self._inventory_number += 1

    async def handle(self, request: ControlRequest, sender: str) -> ControlReply:
        """Carry out a request of whoever holds the key ``sender``.

        Raises:
            PacelineError: it is not carried out, and why.
        """
        match request:
            case Hello():
                return self._welcome(request, sender)
            case Heartbeat():
                return HeartbeatReply(number=request.number, status=self._status())
            case SetPaused() | Quit() if sender != self._identity.public_key:
                raise EnrolmentError("Only the owner of this PC may ask for that.")
            case SetPaused(paused=paused):
                self._keep(msgspec.structs.replace(self._state, paused=paused))
            case Quit():
                asyncio.get_running_loop().call_later(QUIT_DELAY_S, self._quit_agent)
            case PrepareStage():
                if self._state.paused:
                    raise DeployError("this PC is paused by its owner and takes no new stages.")
                self._deployments.prepare(request, sender)
            case StartStage():
                self._deployments.start_stage(request, sender)
            case StartGateway():
                self._deployments.start_gateway(request, sender)
            case Undeploy(deployment=deployment):
                self._deployments.undeploy(deployment)
            case Leave():
                self._trust.forget_controller(sender)
                self._deployments.undeploy_of(sender)
                self._allow_list.replace(allowed_keys(self._trust, self._identity))
                self.announce(next(iter(self._trust.controllers()), ""))
        return Done(number=request.number)

    def _welcome(self, request: Hello, sender: str) -> Welcome:
        token_id, token_proof = "", ""
        controller = self._trust.controllers().get(sender)
        if controller is not None:
            token_id, token_proof = controller.token_id, controller.prove(self._identity.public_key, request.nonce)
            if controller.name != request.controller_name:
                self._trust.trust_controller(sender, request.controller_name)
        return Welcome(
            number=request.number,
            protocol=PROTOCOL_VERSION,
            name=self._name,
            inventory=self._inventory,
            transfer_port=self.transfer_port,
            token_id=token_id,
            token_proof=token_proof,
        )

    def _status(self) -> NodeStatus:
        return NodeStatus(
            load=self._load.read(),
            paused=self._state.paused,
            stages=self._deployments.stage_statuses(),
            gateways=self._deployments.gateway_statuses(),
            inventory_number=self._inventory_number,
        )

    def _keep(self, state: AgentState) -> None:
        self._state = state
        keep_state(self._data_dir, state)
