"""Decides how a prompt is computed: what is loaded, how much is recomputed, where entries are kept.

`Controller.decide` makes one decision for each request. It uses a profile that is measured once,
and corrected by the times of requests. The pure arithmetic is in `decision.py` and `estimators.py`.
"""

from .controller import Controller
from .method import Method, Methods
from .profile import Profile
from .profile_in_use import ProfileInUse
from .profiler import Profiler
from .reasons import Why

__all__ = ["Controller", "Method", "Methods", "ProfileInUse", "Profile", "Profiler", "Why"]
