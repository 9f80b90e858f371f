"""The console command."""


def main() -> None:
    pass
