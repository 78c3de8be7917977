"""`python -m scripts.benchmark`: the speed of engine, server and peers."""

from scripts.benchmark.run import main

if __name__ == "__main__":
    main()
