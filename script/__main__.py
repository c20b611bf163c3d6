"""`python -m script predict|serve`: a Ctrl-C during the imports, which take a while, ends it without a traceback."""

import signal
import sys
from importlib import import_module

MODULES = {"predict": "script.client", "serve": "script.server"}

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until main() says otherwise
    sys.exit(import_module(MODULES[sys.argv.pop(1)]).main())
