"""Run a case, or every one that a CPU can: see runner.py.

python benchmarks/run.py                            # the cases, a line each
python benchmarks/run.py CASE --help
python benchmarks/run.py CASE[,CASE] [--rounds N] [--threads N] ... [--dry] [--seconds S]
python benchmarks/run.py all [--threads 2]          # make bench: 12 minutes on two threads, then the tables
"""

from runner import main

if __name__ == "__main__":
    main()
