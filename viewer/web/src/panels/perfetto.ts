// Opens the step that is shown in the Perfetto UI, which takes traces from the page that opened it. Only the browser has
// the trace then ("deep linking" in the documentation of Perfetto).

import type { ServerSource } from "../data/server";
import { byId } from "../dom";
import { stepName } from "../format";

const ASK_EVERY = 100; // ms
const GIVE_UP_AFTER = 60_000; // ms
const UNREACHABLE =
  "The Perfetto UI does not answer. Can this browser reach ui.perfetto.dev? The file for it: commtrace export";

/** Shows the button; `step` is the number of the step that is in view. */
export function offerPerfetto(source: ServerSource, run: string, step: () => number | null): void {
  const address = document.documentElement.dataset.perfetto!; // every page that is served has it
  const button = byId<HTMLButtonElement>("open-perfetto");
  const state = byId("perfetto-state");
  button.hidden = false;
  button.addEventListener("click", async () => {
    const number = step();
    // At once: a browser blocks pages that are opened later than the click. It can be talked to only with an opener.
    const ui = number === null ? null : window.open(address, "_blank");
    if (number === null || !ui) {
      state.textContent = number === null ? "" : "The browser did not let this page open another one.";
      return;
    }
    state.textContent = "Making the trace…";
    button.disabled = true;
    try {
      const trace = await source.bytes(`step/${number}/perfetto`);
      if (!trace) throw new Error(`There is no trace of ${stepName(number)}.`);
      await answered(ui, address);
      const title = `${run}: ${stepName(number)}`.replaceAll(" · ", ": "); // of "·" the UI would make a gap
      const perfetto = { buffer: trace, title };
      ui.postMessage({ perfetto }, address, [trace]);
      state.textContent = "";
    } catch (error) {
      state.textContent = error instanceof Error ? error.message : String(error);
    } finally {
      button.disabled = false;
    }
  });
}

/** Waits until the UI listens: it has no event for that, but answers. */
function answered(ui: Window, address: string): Promise<void> {
  return new Promise((resolve, reject) => {
    const begin = Date.now();
    const end = () => {
      clearInterval(timer);
      window.removeEventListener("message", onMessage);
    };
    const onMessage = (event: MessageEvent) => {
      if (event.source !== ui || event.origin !== address || event.data !== "PONG") return;
      end();
      resolve();
    };
    const timer = setInterval(() => {
      if (ui.closed || Date.now() - begin > GIVE_UP_AFTER) {
        end();
        reject(new Error(UNREACHABLE));
      } else ui.postMessage("PING", address);
    }, ASK_EVERY);
    window.addEventListener("message", onMessage);
  });
}
