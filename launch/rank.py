"""What launch/multi_node.sh has the deepspeed launcher start on each host: it becomes train.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dstrain.on_host import become_rank

if __name__ == "__main__":
    become_rank(sys.argv[1])
