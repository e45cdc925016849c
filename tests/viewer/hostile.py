"""Text that would be markup on a page."""

from __future__ import annotations

HOSTILE = "</script><script>alert(1)</script><!-- <img src=x onerror=alert(2)> & \u2028 {{script}}"
