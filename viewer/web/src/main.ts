import "./viewer.css";
import { EmbeddedSource, readRun } from "./data/source";
import { byId, element } from "./dom";
import { showBreakdown } from "./panels/breakdown";
import { showCommunication } from "./panels/communication";
import { showCoverage } from "./panels/coverage";
import { showHeader } from "./panels/header";
import { showCriticalPath, showLostTime } from "./panels/lost_time";
import { showPipeline } from "./panels/pipeline";
import { showStragglers } from "./panels/stragglers";
import { TimelinePanel } from "./panels/timeline";
import { Theme } from "./theme";

declare global {
  interface Window {
    /** For tests: what is drawn, without reading pixels; null until the first step is there. */
    commtraceViewer: { visibleBoxes(): object[]; window(): { step: number; from: number; to: number } | null } | null;
  }
}

async function start(): Promise<void> {
  const theme = new Theme();
  byId("theme").addEventListener("click", () => theme.toggle());
  byId("close-help").addEventListener("click", () => byId<HTMLDialogElement>("help").close());
  const source = new EmbeddedSource();
  const run = await readRun(source);
  const { summary } = run;
  let panel: TimelinePanel | null = null;
  const showRank = (rank: number) => panel?.showRank(rank);
  showHeader(run);
  showBreakdown(run, theme, showRank);
  showCriticalPath(summary, theme);
  showLostTime(summary);
  showStragglers(summary, showRank);
  showPipeline(summary, showRank);
  showCommunication(summary);
  showCoverage(summary);
  if (run.steps.length) {
    panel = new TimelinePanel(run, source, theme);
    await panel.start();
  } else byId("timeline-body").replaceChildren(element("p", run.note, "empty"));
  const timeline = panel?.timeline;
  window.commtraceViewer = {
    visibleBoxes: () => timeline?.visibleBoxes() ?? [],
    window: () =>
      timeline?.step ? { step: timeline.step.number, from: timeline.viewport.from, to: timeline.viewport.to } : null,
  };
}

window.commtraceViewer = null;
start()
  .then(() => {
    document.documentElement.dataset.ready = "";
  })
  .catch((error: unknown) => {
    const text = error instanceof Error ? error.message : String(error);
    byId("notes").prepend(element("li", `This page could not be shown: ${text}`));
    throw error;
  });
