"""The command; it says which extra to install where the demo's own packages are missing."""

import sys

if __name__ == "__main__":
    try:
        from bayesopt_chain.demo.command import main
    except ModuleNotFoundError as missing:
        sys.exit(f'The demo needs {missing.name}, which is not installed: pip install "bayesopt_chain[demo]"')
    main()
