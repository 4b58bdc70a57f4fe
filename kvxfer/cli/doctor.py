"""Says what kvxfer can do on this machine, and why not more."""
HELP = "say what works on this machine, and why not more"
def add_arguments(parser): parser.add_argument("--json", action="store_true")
def run(args): return 0
