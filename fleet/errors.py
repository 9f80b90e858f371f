"""The errors that a person sees: one plain sentence that says what, where and what to do."""


class PacelineError(Exception):
    """A fault that a person can act on. ``str(error)`` is the sentence that the person reads."""


class ModelError(PacelineError):
    """A model, shard folder or tokenizer cannot be used as it is."""


class MessageError(PacelineError):
    """A message from another process is malformed, too large or of a version that is not spoken here."""


class EnrolmentError(PacelineError):
    """A token is wrong, expired or used up, or a key is not trusted."""


class UnreachableError(PacelineError):
    """A node, stage or gateway does not answer."""


class PlacementError(PacelineError):
    """No placement fits the nodes that are there; the text says what is missing."""


class TransferError(PacelineError):
    """A shard did not arrive whole."""


class DeployError(PacelineError):
    """A deployment failed; the text names the node and the step."""


class CancelledError(PacelineError):
    """The person asked to stop."""


class DataFolderError(PacelineError):
    """A file in the data folder cannot be read or written, or is damaged."""


class RefusedError(PacelineError):
    """A node did not carry out a request; the text names the node and gives its reason."""
