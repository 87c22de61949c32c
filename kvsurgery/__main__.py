from kvsurgery.cli import main

main()
