import type { Theme } from "../theme";
import type { Scene } from "./painter";

/** What is drawn over the boxes of a timeline. */
export interface Overlay {
  draw(context: CanvasRenderingContext2D, scene: Scene, theme: Theme): void;
}
