"""``python -m trainer VERB``: the same verbs as the zipapp, from a source folder."""

import sys

from trainer.cli import main

sys.exit(main())
