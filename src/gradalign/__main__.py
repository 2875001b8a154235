from gradalign.cli import main

main()
