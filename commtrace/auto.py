"""The one line: ``import commtrace.auto`` starts recording as COMMTRACE_* variables say.

It may stand before or after the imports of torch and of the training framework.
"""

from commtrace.session import start

start()
