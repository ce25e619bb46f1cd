"""`python -m pscli`: the command line without an installed script; workers are started this way."""

from pscli.start import run

if __name__ == "__main__":
    run()
