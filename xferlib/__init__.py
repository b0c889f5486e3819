"""Move arrays between host and GPU while the GPU computes, the same way from every array library."""

from xferlib.errors import AllocationError as AllocationError
from xferlib.errors import BackendUnavailableError as BackendUnavailableError
from xferlib.errors import CapabilityError as CapabilityError
from xferlib.errors import ClosedError as ClosedError
from xferlib.errors import TransferError as TransferError
from xferlib.errors import UnknownBackendError as UnknownBackendError
from xferlib.errors import XferError as XferError
from xferlib.protocol import Capabilities as Capabilities
from xferlib.protocol import Event as Event
from xferlib.protocol import HostStager as HostStager
from xferlib.registry import backends as backends
from xferlib.registry import stager as stager
from xferlib.stager import Stager as Stager
from xferlib.stats import Stats as Stats
from xferlib.transfer import Transfer as Transfer
