"""The README's pictures, of what ``make demo KEEP=1`` has left up: ``python -m tests.browser.screenshots RUN``."""

from __future__ import annotations

import sys

from playwright.sync_api import expect, sync_playwright

from local import envs
from local.airflow import LocalAirflow
from local.laptop import PROJECT, Laptop
from tests.browser.conftest import ARGUMENTS, CHROMIUM
from tests.browser.pages import TriggerForm, log_in, open_dag

IMAGES = PROJECT / "docs" / "images"
DAG = "swift_train"


def main(run_id: str) -> None:
    """Writes ``docs/images/dag-run.png`` and ``trigger-form.png``."""
    laptop = Laptop(PROJECT / ".local-run")
    airflow = LocalAirflow(
        laptop.folder / "airflow", PROJECT, envs.ensure_overlay(), laptop.settings["airflow_port"], laptop.variables()
    )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        page = browser.new_context(viewport={"width": 1280, "height": 840}).new_page()
        log_in(page, airflow.url, "admin", airflow.password)
        page.goto(f"{airflow.url}/dags/{DAG}/runs/{run_id}")
        expect(page.get_by_text("Task Instances").first).to_be_visible()
        expect(page.get_by_role("link", name="prune").first).to_be_visible()
        page.wait_for_load_state("networkidle")
        page.screenshot(path=str(IMAGES / "dag-run.png"))
        page.set_viewport_size({"width": 1280, "height": 1500})
        open_dag(page, airflow.url, DAG)
        form = TriggerForm(page)
        form.section("Run").click()
        expect(form.dialog.locator("#element_recipe")).to_be_visible()
        page.wait_for_timeout(1000)  # the section opens with an animation
        form.dialog.screenshot(path=str(IMAGES / "trigger-form.png"))
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1])
